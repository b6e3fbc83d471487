// Filters as chips: the values that a catalogue's fields have, from the facets of an answer.

import { post } from "../lib/api.js";
import { button, el, remembered } from "../lib/dom.js";
import { bound, count } from "../lib/format.js";

const SAMPLE = 100; // items whose attributes are looked at
const VALUES = 6; // chips of a field
const EVERY = 1000; // chips of a field of which all are wanted
const FIELDS = 5;

// Fields of few values, which are worth a chip: ids and addresses have as many as there are items.
const fields = remembered(async () => {
  const sample = await post("v1/search", { limit: SAMPLE, fields: ["attributes"] });
  const names = new Set();
  for (const item of sample.items)
    for (const [name, value] of Object.entries(item.fields?.attributes ?? {})) if (isPlain(value)) names.add(`attributes.${name}`);
  const asked = ["categories", "tags", ...[...names].slice(0, 12)].map((field) => ({ field, limit: VALUES }));
  const { facets, total } = await post("v1/search", { limit: 1, facets: asked });
  return facets.filter((facet) => isRange(facet) || isCommon(facet, total)).slice(0, FIELDS).map(({ field }) => field);
});

const isPlain = (value) => value !== null && (typeof value !== "object" || (Array.isArray(value) && value.every(isPlain)));
const isRange = ({ min, values, other }) => typeof min === "number" && (other > 0 || values.length >= VALUES);
const isCommon = ({ field, values, other }, total) => values.length > 0 && (field === "categories" || values.length < VALUES || values[1].count >= total / 500) && values.some(({ count: of }) => of < total || other);

// Chips in `place`, whose parent is hidden while there are none; `changed` is called when one is pressed.
export class Filters {
  constructor(place, changed) {
    this.place = place;
    this.changed = changed;
    this.chosen = new Map(); // field -> values as JSON
    this.ranges = new Map(); // field -> {gte, lte}
    this.whole = new Set(); // fields of which every value is shown
  }

  // The facets to ask for: at least one, for an answer with facets says how many items match.
  async facets() {
    const names = await fields();
    return (names.length ? names : ["categories"]).map((field) => ({ field, limit: this.whole.has(field) ? EVERY : VALUES }));
  }

  // Takes the `filter` of an address.
  restore(filter) {
    this.chosen.clear();
    this.ranges.clear();
    for (const { field, in: values, ...bounds } of filter?.all ?? []) {
      if (values) this.chosen.set(field, new Set(values.map((value) => JSON.stringify(value))));
      else this.ranges.set(field, bounds);
    }
  }

  get filter() {
    const conditions = [...this.chosen].map(([field, values]) => ({ field, in: [...values].map((value) => JSON.parse(value)) }));
    for (const [field, bounds] of this.ranges) conditions.push({ field, ...bounds });
    return conditions.length ? { all: conditions } : {};
  }

  get isEmpty() {
    return !this.chosen.size && !this.ranges.size;
  }

  show(facets) {
    const focused = this.place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const groups = (facets ?? []).map((facet) => (isRange(facet) ? this.range(facet) : this.group(facet)));
    const clear = button("Clear filters", () => this.clear(), { class: "clear", "data-key": "clear" });
    const shown = [...groups.filter(Boolean), ...(this.isEmpty ? [] : [clear])];
    this.place.replaceChildren(...shown);
    this.place.parentElement.hidden = !shown.length;
    if (focused) [...this.place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused)?.focus();
  }

  clear() {
    this.chosen.clear();
    this.ranges.clear();
    this.changed();
  }

  group({ field, values, other }) {
    const own = this.chosen.get(field) ?? new Set();
    const listed = values.map(({ value, count: of }) => [JSON.stringify(value), of]);
    const missing = [...own].filter((value) => !listed.some(([one]) => one === value)).map((value) => [value, 0]);
    const all = [...missing, ...listed];
    if (!all.length) return null;
    return el("div", { class: "facet", role: "group", "aria-label": label(field) }, el("span", { class: "name" }, label(field)), all.map(([value, of]) => this.chip(field, value, of)), this.more(field, other));
  }

  // A button that shows every value of a field, and the few again.
  more(field, other) {
    const isWhole = this.whole.has(field);
    if (!isWhole && !other) return null;
    const toggle = () => {
      this.whole[isWhole ? "delete" : "add"](field);
      this.changed();
    };
    const some = isWhole && other ? el("span", { class: "note" }, `Only the ${count(EVERY)} most frequent are listed.`) : null;
    const press = button(isWhole ? "fewer" : "all …", toggle, { class: "chip", "aria-label": `${isWhole ? "Fewer" : "All"} ${label(field)}`, "data-key": `${field} all` });
    return [some, press];
  }

  chip(field, value, of) {
    const pressed = this.chosen.get(field)?.has(value) ?? false;
    const told = JSON.parse(value);
    const toggle = () => {
      const values = this.chosen.get(field) ?? new Set();
      if (pressed) values.delete(value);
      else values.add(value);
      if (values.size) this.chosen.set(field, values);
      else this.chosen.delete(field);
      this.changed();
    };
    return el(
      "button",
      { type: "button", class: "chip", "aria-pressed": `${pressed}`, "data-key": `${field} ${value}`, onclick: toggle },
      `${told === null ? "none" : told}`.slice(0, 60),
      el("span", { class: "count" }, count(of)),
    );
  }

  range({ field, min, max }) {
    const bounds = this.ranges.get(field) ?? {};
    const input = (name, word, hint) =>
      el("input", {
        type: "number", step: "any", "aria-label": `${label(field)} ${word}`, placeholder: `${word} ${bound(hint)}`, value: bounds[name] ?? "", "data-key": `${field} ${name}`,
        onchange: (event) => {
          const given = { ...(this.ranges.get(field) ?? {}) };
          if (event.target.value === "") delete given[name];
          else given[name] = Number(event.target.value);
          if (Object.keys(given).length) this.ranges.set(field, given);
          else this.ranges.delete(field);
          this.changed();
        },
      });
    return el("div", { class: "facet", role: "group", "aria-label": label(field) }, el("span", { class: "name" }, label(field)), input("gte", "from", min), input("lte", "to", max));
  }
}

export const label = (field) => field.replace(/^attributes\./, "").replaceAll("_", " ");
