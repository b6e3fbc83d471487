// Why an item is shown: a sentence first, and its figures behind a click.

import { share, signed } from "../lib/bars.js";
import { el } from "../lib/dom.js";
import { listed, number } from "../lib/format.js";
import { titleOf } from "../lib/titles.js";

const LEAST = 5e-4; // of a contribution that is a reason: less is shown as 0.000
const NAMED = 2; // events in a sentence
const BESIDE = 0.1; // of the first one's contribution: less is not worth naming beside it
const DONE = {
  buy: "bought", cart: "put into the cart", click: "clicked", like: "liked", listen: "listened to", order: "ordered", play: "played",
  purchase: "bought", rate: "rated", rating: "rated", read: "read", view: "viewed", watch: "watched",
};
const PARTS = {
  attention: "attention to the history",
  transitions: "what follows what they did",
  similarity: "what goes with what they took",
  prior: "how popular it is",
};

export const done = (type) => DONE[type] ?? `had “${type}” of`;
export const reasonKey = (row) => `${row.type} ${row.item_id ?? row.title}`; // no two reasons of an item have the same
const times = (row) => (row.events > 1 ? ` (${row.events} times)` : "");
export const reasonName = (row) => `${row.type || "interest"}: ${row.title || titleOf(row.item_id)}${times(row)}`;
export const partName = (name) => PARTS[name] ?? name.replaceAll("_", " ");

// The events that raised the score: those that lowered it are no reason.
export function raising(item) {
  const rows = (item.explanation ?? []).filter((row) => row.contribution >= LEAST);
  return rows.filter((row) => row.contribution >= BESIDE * rows[0].contribution).slice(0, NAMED);
}

export function sentence(item) {
  const events = raising(item);
  if (!events.length && item.reason === "popular") return item.score ? "Popular with everyone." : "Nobody has done anything with it yet.";
  if (!events.length) return item.reason === "content" ? "Close to what the history is about." : "From the history as a whole.";
  const by = new Map(); // what was done -> titles
  for (const row of events) {
    const verb = row.type ? done(row.type) : "like";
    by.set(verb, (by.get(verb) ?? new Set()).add(`“${row.title || titleOf(row.item_id)}”`)); // an item may be taken twice
  }
  const told = [...by].map(([verb, titles]) => `${verb} ${listed([...titles])}`);
  return `Because you ${listed(told)}.${item.reason === "content" ? " By its text: no model is trained yet." : ""}`;
}

// The parts of a score, which add up to it, and the events that are named.
export function figures(item) {
  const parts = Object.entries(item.parts ?? {});
  if (!parts.length) return null;
  const events = item.explanation ?? [];
  const largest = Math.max(...parts.map(([, value]) => Math.abs(value)), ...events.map((row) => Math.abs(row.contribution)));
  const row = (name, value) =>
    el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "signed" }, signed(value, largest)), el("td", { class: "number" }, number(value)));
  return el(
    "details",
    { class: "figures" },
    el("summary", {}, "Figures"),
    el(
      "table",
      {},
      el("caption", {}, "The parts add up to the score."),
      el("tbody", {}, parts.map(([name, value]) => row(partName(name), value)), el("tr", { class: "total" }, el("th", { scope: "row" }, "the score"), el("td"), el("td", { class: "number" }, number(item.score)))),
    ),
    events.length
      ? el(
          "table",
          {},
          el("caption", {}, "Events that moved it most."),
          el("tbody", {}, events.map((each) => row(reasonName(each), each.contribution))),
        )
      : null,
  );
}

// Of a search: the fields that matched, as a sentence.
export function matches(item) {
  const fields = Object.entries(item.matched ?? {}).filter(([, part]) => part >= 0.005);
  return fields.length ? `Matches in ${listed(fields.map(([name]) => name))}.` : "";
}

// The weight of an item that a search found, and which share of it each field holds.
export const weights = (item) =>
  el(
    "details",
    { class: "figures" },
    el("summary", {}, "Figures"),
    el("p", { class: "beside" }, "Weight among all items, and the share of it that each field holds."),
    share(item.weight, "weight"),
    Object.entries(item.matched ?? {}).map(([name, part]) => el("div", { class: "rival" }, el("span", {}, name), share(part, name))),
  );
