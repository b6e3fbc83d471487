// Two answers side by side: of the draft, of versions and of other scenarios, to one and the same request.

import { itemPath, post } from "../lib/api.js";
import { el, trouble } from "../lib/dom.js";
import { shown, wanted } from "../lib/fields.js";
import { number } from "../lib/format.js";
import { current as person } from "../explore/session.js";
import { sentence } from "../explore/reasons.js";

const ABOUT_ITEMS = new Set(["similar", "together"]);

// The section; `draft()` is the scenario as it stands in the editor.
export function preview(name, scenarios, versions, draft) {
  const used = versions[0]?.scenario ? versions[0].version : null;
  const choices = [
    { label: "the draft above", scenario: draft },
    ...versions.filter(({ scenario }) => scenario).map(({ version, scenario }) => ({ label: `version ${version}${version === used ? ", in use" : ""}`, scenario: () => scenario })),
    ...scenarios.filter((each) => each.name !== name).map((each) => ({ label: `${each.name}, in use`, scenario: () => each.scenario, saved: each.name })),
  ];
  if (used) Object.assign(choices[1], { saved: name });
  const field = (id, text, value, hint) => [el("label", { for: id }, text), el("input", { id, type: "text", autocomplete: "off", value, placeholder: hint })];
  const sides = [0, 1].map((at) => side(at, choices, Math.min(at, choices.length - 1)));
  const run = async () => {
    const [user, query, item] = [...form.querySelectorAll("input")].map((input) => input.value.trim());
    await Promise.all(sides.map((each) => answer(each, { user, query, item })));
    compare(sides);
  };
  const form = el(
    "form",
    { class: "request", onsubmit: run },
    el("div", {}, field("preview-user", "Ask for user", person(), "nobody")),
    el("div", {}, field("preview-query", "Query, of a search", "", "words")),
    el("div", {}, field("preview-item", "Item, of similar and together", "", "an item's id")),
    el("button", { type: "submit" }, "Preview both"),
  );
  return el("div", { class: "preview" }, el("h3", {}, "Preview two side by side"), form, el("div", { class: "halves" }, sides.map((each) => each.place)));
}

function side(at, choices, chosen) {
  const id = `side-${at}`;
  const select = el("select", { id }, choices.map(({ label }, place) => el("option", { value: place, selected: place === chosen }, label)));
  const note = el("p", { class: "note", role: "status" });
  const list = el("ol", { class: "answer" });
  return { choices, select, note, list, items: [], place: el("div", {}, el("label", { for: id }, at ? "Right" : "Left"), select, note, list) };
}

async function answer(each, request) {
  const choice = each.choices[each.select.value];
  each.items = [];
  each.list.replaceChildren();
  each.note.textContent = "";
  try {
    const found = await ask(choice, request);
    const rows = found.rows ?? [{ items: found.items }];
    each.items = rows.flatMap(({ items, reason }) => items.map((item) => ({ ...item, row: reason?.text })));
    each.note.textContent = each.items.length ? "" : "Nothing is answered.";
  } catch (error) {
    if (!error.status) trouble(error);
    each.note.textContent = error.message;
  }
}

// A saved scenario is asked by its name, with its fallback; what is not in use, as the question that it is.
function ask({ scenario, saved }, { user, query, item }) {
  const { question, fallback, ...fields } = scenario();
  const given = { fields: wanted() };
  const lists = question === "search" && (fields.sort?.length || !(query || fields.query)); // which attends nobody
  if (user && !lists && !ABOUT_ITEMS.has(question)) given.user_id = user;
  if (query && question === "search") given.query = query;
  if (item && ABOUT_ITEMS.has(question) && !fields.item_id) given.item_id = item;
  if (saved) return post(`v1/scenarios/${encodeURIComponent(saved)}`, given);
  const { item_id: about, ...rest } = { ...fields, ...given };
  if (!ABOUT_ITEMS.has(question)) return post(`v1/${question}`, rest);
  if (!about) throw new Error(`Name an item: ${question} is asked about one.`);
  return post(`${itemPath(about)}/${question}`, rest);
}

// Both lists, with what is in one of them alone, and how far an item has moved.
function compare([left, right]) {
  for (const [own, other] of [[left, right], [right, left]]) {
    const places = new Map(other.items.map((item, at) => [item.item_id, at]));
    own.list.replaceChildren(...own.items.map((item, at) => row(item, at, places.get(item.item_id), own.items[at - 1]?.row)));
  }
}

function row(item, at, there, before) {
  const { name, price, subtitle } = shown(item);
  const moved = there === undefined ? "only here" : there === at ? "" : `${there > at ? "↑" : "↓"} ${Math.abs(there - at)}`;
  return el(
    "li",
    { "data-item": item.item_id },
    item.row && item.row !== before ? el("p", { class: "beside" }, item.row) : null,
    el("p", {}, el("span", { class: "place" }, `${at + 1}`), " ", name, " ", moved ? el("span", { class: "badge" }, moved) : null),
    el("p", { class: "beside" }, [price, subtitle, typeof item.score === "number" ? `score ${number(item.score)}` : ""].filter(Boolean).join(" · ")),
    item.explanation?.length ? el("p", { class: "beside" }, sentence(item)) : null,
  );
}
