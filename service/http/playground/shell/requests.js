// Which routes refuse or fail.

import { $, el, head } from "../lib/dom.js";
import { count, counted, percent } from "../lib/format.js";

// Shows refused and failed requests by route, of `all` and since this page was `opened`. Returns a note.
export function outcomes(all, opened) {
  const here = (route) => all[route].map((value, at) => value - (opened[route]?.[at] ?? 0));
  [$("refused").textContent, $("failing").textContent] = shares(here("all"));
  const rows = Object.entries(all).filter(([route, counts]) => route === "all" || counts[1] + counts[2]);
  $("by-route").replaceChildren(
    el("thead", {}, el("tr", {}, ["route", "since this page was opened", "since the start"].map((text) => head(text)))),
    el("tbody", {}, rows.map(([route, counts]) => el("tr", {}, el("th", { scope: "row" }, route), [here(route), counts].map((each) => el("td", {}, said(each)))))),
  );
  return `of ${counted(here("all")[0], "request")} since this page was opened; ${said(all.all)} since the start`.replaceAll(" %", "\u00a0%");
}

const shares = ([requests, ...parts]) => parts.map((part) => (requests ? percent(part / requests) : "–"));

function said(counts) {
  const [refused, failed] = shares(counts);
  return `${refused} refused, ${failed} failed of ${count(counts[0])}`;
}
