// Where the time of the last requests of this page went, and which routes refuse or fail.

import { onTiming, timings } from "../lib/api.js";
import { $, el, head } from "../lib/dom.js";
import { count, number, percent } from "../lib/format.js";

export const begin = () => onTiming(draw);

const draw = () => table("latency", [head("request"), head("ms here", true), head("ms in the service")], timings.map(timing));
const table = (id, heads, rows) => $(id).replaceChildren(el("thead", {}, el("tr", {}, heads)), el("tbody", {}, rows));
const row = (title, ...cells) => el("tr", {}, el("th", { scope: "row" }, title), cells);

const timing = ({ path, total, stages }) =>
  row(path, el("td", { class: "number" }, number(total, 1)), el("td", {}, Object.entries(stages).map(([name, ms]) => `${name} ${number(ms, 1)}`).join(", ")));

// Shows refused and failed requests by route, of `all` and since this page was `opened`. Returns a note.
export function outcomes(all, opened) {
  const here = (route) => all[route].map((value, at) => value - (opened[route]?.[at] ?? 0));
  [$("refused").textContent, $("failing").textContent] = shares(here("all"));
  const rows = Object.entries(all).filter(([route, counts]) => route === "all" || counts[1] + counts[2]);
  table("by-route", ["route", "since this page was opened", "since the start"].map((text) => head(text)), rows.map(([route, counts]) => row(route, ...[here(route), counts].map((each) => el("td", {}, said(each))))));
  return `of ${count(here("all")[0])} since this page was opened; ${said(all.all)} since the start`;
}

const shares = ([requests, ...parts]) => parts.map((part) => (requests ? percent(part / requests) : "–"));

function said(counts) {
  const [refused, failed] = shares(counts);
  return `${refused} refused, ${failed} failed of ${count(counts[0])}`;
}
