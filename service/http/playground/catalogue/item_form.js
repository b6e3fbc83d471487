// The fields of an item, to be edited one by one; only what is changed is sent.

import { el } from "../lib/dom.js";
import { label as named } from "../explore/facets.js";

const isList = (value) => Array.isArray(value) && value.every((each) => typeof each === "string");
const isPlain = (value) => ["string", "number", "boolean"].includes(typeof value) || (isList(value) && value.length > 0);
const TEXTS = { title: "Title", description: "Description", tags: "Tags, one a line", categories: "Categories, one a line", published_at: "Published" };

// `save(edited)` stores the item as it was edited, and throws a `Problem` if it is refused.
export function itemForm(value, save) {
  const inputs = [
    ...Object.entries(TEXTS).map(([name, label]) => input([name], label, value[name] ?? "")),
    ...Object.entries(value.attributes).filter(([, each]) => isPlain(each)).map(([name, each]) => input(["attributes", name], isList(each) ? `${named(name)}, one a line` : named(name), each)),
  ];
  const errors = el("ul", { class: "errors" });
  const submit = async () => {
    errors.replaceChildren();
    for (const { field } of inputs) field.removeAttribute("aria-invalid");
    const edited = { ...value, attributes: { ...value.attributes } };
    for (const { path, read } of inputs) {
      const [place, name] = path.length > 1 ? [edited.attributes, path[1]] : [edited, path[0]];
      place[name] = read();
      if (place[name] === null && place === edited.attributes) delete place[name];
    }
    try {
      await save(edited);
    } catch (error) {
      const told = error.errors?.length ? error.errors : [{ pointer: "", detail: error.message }];
      errors.replaceChildren(...told.map(({ pointer, detail }) => el("li", {}, `${pointer} ${detail}`)));
      const wrong = inputs.find(({ path }) => told.some(({ pointer }) => `${pointer}/`.startsWith(`/${path.join("/")}/`)));
      wrong?.field.setAttribute("aria-invalid", "true");
      wrong?.field.focus();
    }
  };
  return el("form", { class: "fields", onsubmit: submit }, inputs.map(({ place }) => place), el("div", { class: "long", role: "status" }, errors), el("button", { type: "submit" }, "Save"));
}

// A labelled input of a value, and what reads it; a number that is emptied is removed.
function input(path, label, value) {
  const id = `field-${path.join("-")}`;
  if (typeof value === "boolean") {
    const field = el("input", { id, type: "checkbox", checked: value });
    return { path, field, read: () => field.checked, place: el("label", { class: "inline" }, field, ` ${label}`) };
  }
  const isNumber = typeof value === "number";
  const isLong = Array.isArray(value) || path[0] === "description";
  const field = isLong ? el("textarea", { id, rows: Array.isArray(value) ? Math.max(2, Math.min(value.length, 8)) : 3 }) : el("input", { id, autocomplete: "off", ...(isNumber ? { type: "number", step: "any" } : { type: "text" }) });
  field.value = Array.isArray(value) ? value.join("\n") : value;
  const before = field.value; // which may have other line ends than what is stored
  const read = () => {
    const text = field.value;
    if (text === before) return path[0] === "published_at" ? value || null : value;
    if (Array.isArray(value)) return text.split("\n").map((line) => line.trim()).filter(Boolean);
    if (isNumber) return text === "" ? null : Number(text);
    return path[0] === "published_at" ? text.trim() || null : text;
  };
  return { path, field, read, place: el("div", { class: isLong || path[0] === "title" ? "long" : null }, el("label", { for: id }, label), field) };
}
