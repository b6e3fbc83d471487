// Catalogue: browse by words, filters and order, page by page, and open one item to edit it.

import { after, get, post } from "../lib/api.js";
import { $, debounced, el, trouble } from "../lib/dom.js";
import { mapped, shown, wanted } from "../lib/fields.js";
import { asSentence, count, counted } from "../lib/format.js";
import { Filters } from "../explore/facets.js";
import { address, link, split } from "../shell/tabs.js";
import { showItem } from "./item_page.js";

const PAGE = 30;
const QUIET = 150; // milliseconds without a key
const ORDERS = [
  ["", "Best match or newest", []],
  ["newest", "Newest first", [{ field: "published_at", order: "desc" }]],
  ["oldest", "Oldest first", [{ field: "published_at", order: "asc" }]],
  ["title", "Title, A to Z", [{ field: "title", order: "asc" }]],
  ["cheapest", "Lowest price first", "asc"],
  ["dearest", "Highest price first", "desc"],
];
let filters;
let running;
let cursor = null;

export async function open(item) {
  if (!filters) begin();
  split("catalogue", item, el("h2", {}, "Choose an item"), el("p", { class: "note" }, "Its page shows how much it is used, what is like it and taken with it, and who would take it next. It edits the item, and hides it from every answer."));
  for (const each of $("catalogue-list").querySelectorAll("a")) mark(each, item);
  if (item) await showItem(item, changed).catch(trouble);
}

function begin() {
  filters = new Filters($("catalogue-chips"), browse);
  const price = mapped("price");
  $("order").replaceChildren(...ORDERS.filter(([, , sort]) => Array.isArray(sort) || price).map(([value, text]) => el("option", { value }, text)));
  const later = debounced(browse, QUIET);
  $("catalogue-query").addEventListener("input", later);
  for (const kind of ["change", "submit"]) $("browse").addEventListener(kind, browse);
  $("more-items").addEventListener("click", () => load(false));
  browse();
}

function browse() {
  cursor = null;
  return load(true);
}

// The next page, or the first one anew; the latest question is answered, whatever comes in late.
async function load(anew) {
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  try {
    const page = $("hidden-only").checked ? await hiddenItems(signal) : await visibleItems(anew, signal);
    if (signal.aborted) return;
    cursor = page.cursor ?? null;
    if (anew) $("catalogue-list").replaceChildren();
    $("catalogue-list").append(...page.items.map(row));
    $("more-items").hidden = !cursor;
    tell(page);
    trouble();
  } catch (error) {
    trouble(error);
  }
}

async function visibleItems(anew, signal) {
  const query = $("catalogue-query").value.trim();
  const [, , chosen] = ORDERS.find(([value]) => value === $("order").value);
  const sort = Array.isArray(chosen) ? chosen : [{ field: mapped("price"), order: chosen }];
  const asked = { query, sort, filter: filters.filter, limit: PAGE, fields: wanted() };
  if (!anew && cursor) asked.cursor = cursor;
  if (anew) asked.facets = await filters.facets();
  const page = await post("v1/search", asked, { signal });
  if (anew && !signal.aborted) filters.show(page.facets);
  return page;
}

async function hiddenItems(signal) {
  filters.show([]);
  return get(`v1/items?hidden=true&plain=true&limit=${PAGE}${after(cursor)}`, { signal });
}

function tell({ total, warnings = [] }) {
  const listed = $("catalogue-list").children.length;
  const hidden = $("hidden-only").checked;
  const none = hidden ? "No item is hidden." : filters.isEmpty && !$("catalogue-query").value.trim() ? "The catalogue is empty: POST /v1/items, or heed import items." : "No item matches.";
  const told = hidden || total === undefined ? counted(listed, hidden ? "hidden item" : "item") : `${count(listed)} of ${counted(total, "item")}`;
  $("catalogue-note").textContent = [listed ? `${told}.` : none, ...warnings.map(({ detail }) => asSentence(detail))].join(" ");
}

function row(item) {
  const { name, price, subtitle } = shown(item);
  const made = el(
    "a",
    { href: link("catalogue", item.item_id), "data-item": item.item_id },
    el("span", { class: "who" }, name, item.hidden ? el("span", { class: "badge" }, "hidden") : null),
    el("span", { class: "beside" }, [price, subtitle, item.item_id].filter(Boolean).join(" · ")),
  );
  mark(made, address()[1]);
  return el("li", {}, made);
}

const mark = (made, item) => (item && made.dataset.item === item ? made.setAttribute("aria-current", "true") : made.removeAttribute("aria-current"));

// An item that was edited is shown as it is now.
function changed(item) {
  const old = [...$("catalogue-list").querySelectorAll("a")].find((each) => each.dataset.item === item.item_id);
  old?.parentElement.replaceWith(row(item));
}
