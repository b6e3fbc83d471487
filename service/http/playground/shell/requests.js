// Where the time of the last requests of this page went.

import { onTiming, timings } from "../lib/api.js";
import { $, el, head } from "../lib/dom.js";
import { number } from "../lib/format.js";

export const begin = () => onTiming(draw);

function draw() {
  $("latency").replaceChildren(
    el("thead", {}, el("tr", {}, head("request"), head("ms here", true), head("ms in the service"))),
    el("tbody", {}, ...timings.map(row)),
  );
}

const row = ({ path, total, stages }) =>
  el(
    "tr",
    {},
    el("th", { scope: "row" }, path),
    el("td", { class: "number" }, number(total, 1)),
    el("td", {}, Object.entries(stages).map(([name, ms]) => `${name} ${number(ms, 1)}`).join(", ")),
  );
