// Explore: what is recommended to the person, what a search finds for them, and what is similar to an item.

import { itemPath, post } from "../lib/api.js";
import { $, button, debounced, el, trouble } from "../lib/dom.js";
import { wanted } from "../lib/fields.js";
import { asSentence, count, counted, listed, marked } from "../lib/format.js";
import { learn, name, titleOf } from "../lib/titles.js";
import { address, link } from "../shell/tabs.js";
import { card } from "./card.js";
import { Filters } from "./facets.js";
import * as person from "./person.js";
import { figures, matches, raising, sentence, weights } from "./reasons.js";
import * as session from "./session.js";
import * as why from "./why.js";

const QUIET = 25; // milliseconds without a key: few type so fast, and a search takes about as long
const LIMIT = 12;
const ROWS = 6;
const IN_ROW = 10;
let filters;
let running;
let origin = ""; // the item whose like is shown
let place; // what the address says but for words: each key would be a step back
const BOXES = { personal: true, "as-rows": true }; // as they are if an address does not name them

// Opened by its tab; `user` and `more` are what the address says, if anything.
export async function open(user, more) {
  const isNamed = user || more.size > 0;
  if (!filters) await begin(user, more);
  else if (!isNamed) remember();
  else if (location.hash !== written()) {
    restore(more);
    if (user && user !== session.current()) await person.choose(user);
    else await ask();
  }
}

// The address of what is shown: it can be shared, and the browser goes back to it.
function written() {
  const query = $("query").value.trim();
  const more = new URLSearchParams(query && { q: query });
  if (origin) more.set("like", origin);
  if (!filters.isEmpty) more.set("filter", JSON.stringify(filters.filter));
  for (const [box, usual] of Object.entries(BOXES)) if ($(box).checked !== usual) more.set(box, usual ? "no" : "yes");
  return [link("explore", session.current()), ...(more.size ? [more] : [])].join("?");
}

function restore(more) {
  origin = more.get("like") ?? "";
  $("query").value = more.get("q") ?? "";
  for (const [box, usual] of Object.entries(BOXES)) $(box).checked = more.has(box) ? more.get(box) === "yes" : usual;
  try {
    filters.restore(JSON.parse(more.get("filter")));
  } catch {
    filters.restore(); // an address may be typed
  }
  $("filters").open ||= !filters.isEmpty;
  place = null;
}

// Puts what is shown into the address: as a step of the history, unless it is the same but for the words.
function remember() {
  const hash = written();
  if ($("explore").hidden || !session.current()) return;
  const now = hash.replace(/([?&]q=)[^&]*/, "$1");
  if (location.hash !== hash) history[place && place !== now && address()[0] === "explore" ? "pushState" : "replaceState"](null, "", hash);
  place = now;
}

async function begin(user, more) {
  filters = new Filters($("chips"), ask);
  restore(more);
  why.begin();
  const later = debounced(ask, QUIET);
  $("query").addEventListener("input", () => {
    origin = "";
    later();
  });
  for (const box of Object.keys(BOXES)) $(box).addEventListener("change", ask);
  $("search").addEventListener("submit", ask);
  session.onChange(ask);
  await person.begin(user);
}

// Ask anew what the page shows: the latest question is answered, whatever comes in late.
export async function ask() {
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  remember();
  $("personal").disabled = !session.current();
  const query = $("query").value;
  const kind = origin ? similar : query.trim() ? search : $("as-rows").checked ? rows : recommend;
  try {
    await kind(query, { filter: filters.filter, facets: await filters.facets(), fields: wanted(), limit: LIMIT }, signal);
    if (!signal.aborted) why.again();
  } catch (error) {
    trouble(error);
  }
}

function show(list, title, note, answer, cards) {
  for (const each of ["rows", "recommended", "results", "similar"]) {
    $(each).hidden = each !== list;
    if (each !== list) $(each).replaceChildren();
  }
  $("more-results").hidden = true;
  $("stage-title").textContent = title;
  const warnings = (answer.warnings ?? []).map(({ detail }) => (note.endsWith(":") ? detail : asSentence(detail)));
  $("search-note").textContent = [note, ...warnings].filter(Boolean).join(" ");
  $("back").hidden = list === "recommended" || list === "rows";
  $("back").onclick = () => {
    origin = "";
    $("query").value = "";
    ask();
    $("query").focus();
  };
  filters.show(answer.facets);
  $(list).replaceChildren(...cards);
  trouble();
}

async function recommend(_query, asked, signal) {
  const user = session.current();
  const answer = await post("v1/recommend", { ...session.requester(), ...asked, explain: 2 }, { signal });
  learn(answer.items);
  await name(answer.items.flatMap((item) => raising(item).map((row) => row.item_id)));
  if (signal.aborted) return;
  const shown = `${answer.items.length} of ${count(answer.total)}`;
  const isNew = answer.items.length > 0 && answer.items.every(({ score }) => !score);
  const note = isNew ? `Nobody has done anything with these yet: ${shown} items, in no order.` : answer.items.length ? `The best ${shown}.` : nothing("recommend");
  show("recommended", isNew ? "Items" : user ? `Recommended for ${user}` : "Popular now", note, answer, answer.items.map((item) => made(item, [el("p", { class: "reason" }, sentence(item)), figures(item)])));
}

// A home page: no item is in two rows, and each row has its reason.
async function rows(query, asked, signal) {
  const { filter, fields: shown, facets } = asked;
  const user = session.current();
  const [answer, counted] = await Promise.all([
    post("v1/rows", { ...session.requester(), filter, fields: shown, rows: ROWS, limit: IN_ROW }, { signal }),
    post("v1/search", { filter, facets, limit: 1 }, { signal }),
  ]);
  const items = answer.rows.flatMap((row) => row.items);
  learn(items);
  await name(items.flatMap((item) => raising(item).map((row) => row.item_id)));
  if (signal.aborted) return;
  if (!items.length && counted.total) return recommend(query, asked, signal);
  const note = items.length ? `${answer.rows.length} rows of a home page, each with its reason.` : nothing("recommend");
  show("rows", user ? `Recommended for ${user}` : "Popular now", note, { ...answer, facets: counted.facets }, answer.rows.map(rowOf));
}

function rowOf({ reason, items }) {
  const id = `row-${(rowOf.number = (rowOf.number ?? 0) + 1)}`;
  return el(
    "section",
    { class: "row", "aria-labelledby": id },
    el("h3", { id, class: "row-reason" }, reason.text),
    el("ol", { class: "cards", tabindex: "0", "aria-labelledby": id }, items.map((item) => made(item, inRow(item, reason)))),
  );
}

// The heading of a row says why; of other rows, what raised the score of an item is its own reason.
const inRow = (item, { kind }) => [kind !== "because" && raising(item).length ? el("p", { class: "reason" }, sentence(item)) : null, figures(item)];

const nothing = (verb) => (filters.isEmpty ? `There is nothing to ${verb} yet: store some items first.` : "Nothing passes these filters: take one away.");

async function search(query, asked, signal) {
  const personal = session.current() && $("personal").checked;
  const question = { query, ...asked, highlight: true, ...(personal ? session.requester() : {}) };
  const answer = await post("v1/search", question, { signal });
  learn(answer.items);
  if (signal.aborted) return;
  const corrections = Object.entries(answer.corrections ?? {}).map(([word, words]) => `No item has “${word}”; searched for “${words.join("”, “")}” instead.`);
  const note = answer.items.length ? matching(answer) : `Nothing was found${answer.warnings?.length ? ":" : "."}`;
  show("results", `Results for “${query.trim()}”`, [...corrections, note].join(" "), answer, answer.items.map(result));
  if (answer.did_you_mean) $("search-note").append(" Did you mean ", offered(answer.did_you_mean), "?");
  offerMore(question, answer.cursor, signal);
}

// A button for the next page, as long as nothing else is asked.
function offerMore(question, cursor, signal) {
  $("more-results").hidden = !cursor;
  $("more-results").onclick = async () => {
    $("more-results").hidden = true;
    try {
      const next = await post("v1/search", { ...question, facets: [], cursor }, { signal });
      learn(next.items);
      const added = next.items.map(result);
      $("results").append(...added);
      const note = $("search-note").firstChild;
      note.data = note.data.replace(/best \d+/, `best ${$("results").children.length}`);
      added[0]?.querySelector("button").focus();
      offerMore(question, next.cursor, signal);
    } catch (error) {
      trouble(error);
    }
  };
}

// How many items match the words.
function matching({ items, total }) {
  const all = `${counted(total, "match", "es")}.`;
  return total > items.length ? `The best ${items.length} of ${all}` : all;
}

// Another spelling, which is searched for if it is what was meant.
function offered(spelling) {
  const onclick = () => {
    $("query").value = spelling;
    $("search").requestSubmit();
  };
  return button(spelling, onclick);
}

function result(item) {
  const texts = item.highlights ?? {};
  return made(
    item,
    [texts.description ? el("p", { class: "snippet" }, marked(texts.description)) : null, el("p", { class: "reason" }, matches(item)), weights(item)],
    marked(texts.title, item.title || item.item_id),
  );
}

async function similar(_query, asked, signal) {
  const [answer] = await Promise.all([post(`${itemPath(origin)}/similar`, asked, { signal }), name([origin])]);
  learn(answer.items);
  if (signal.aborted) return;
  const note = answer.items.length ? `Compared in ${(answer.spaces ?? []).map((space) => (space === "content" ? "their texts" : "what was learned from events")).join(" and ")}.` : "Nothing is similar to it.";
  show("similar", `Similar to ${titleOf(origin)}`, note, answer, answer.items.map((item) => made(item, [el("p", { class: "reason" }, likeness(item)), alike(item)])));
}

function likeness(item) {
  const spaces = Object.entries(item.spaces ?? {}).filter(([, { share: part }]) => part >= 0.05);
  const told = listed(spaces.map(([space]) => (space === "content" ? "alike in text" : "taken by the same people")));
  return told && asSentence(told);
}

const alike = ({ spaces = {} }) =>
  el("details", { class: "figures" }, el("summary", {}, "Figures"), el("p", { class: "beside" }, Object.entries(spaces).map(([space, { cosine }]) => `${space}: cosine ${cosine.toFixed(2)}`).join(", ")));

function made(item, details, title) {
  const like = () => {
    origin = item.item_id;
    ask();
    $("stage-title").focus();
  };
  return card(item, {
    title,
    details,
    actions: [
      ["Try", () => person.attempt(item)],
      ["Why", () => why.open(item)],
      ["Similar to", like],
    ],
  });
}
