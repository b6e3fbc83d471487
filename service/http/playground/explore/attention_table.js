// Where each head attends: events down, heads across; a cell's bar is as long as its weight is large.

import { el, head, svg } from "../lib/dom.js";
import { counted, percent } from "../lib/format.js";
import { about } from "./person.js";

export function attentionTable(map, explained, limit, trials) {
  const apart = trials ? ` ${counted(trials, "trial")} ${trials === 1 ? "is" : "are"} not stored, and not in it.` : "";
  const titles = new Map(explained.map((row) => [row.event_id, row.title || row.item_id]));
  const shown = map.rows.slice(0, limit).map((_, at) => at);
  if (!shown.length) return [el("caption", {}, `There is no stored event to attend to.${apart}`)];
  const name = (at) => titles.get(map.ids?.[at]) ?? about(map.ids?.[at]) ?? map.ids?.[at] ?? "interest";
  return [
    el("caption", {}, `The ${shown.length} rows of most weight.${apart}`),
    el("thead", {}, el("tr", {}, head("event"), map.weights.map((_, at) => head(`head ${at + 1}`)))),
    el(
      "tbody",
      {},
      shown.map((at) =>
        el("tr", {}, el("th", { scope: "row" }, name(at)), map.weights.map((weights) => el("td", {}, percent(weights[at]), cell(weights[at])))),
      ),
    ),
  ];
}

function cell(weight) {
  const width = Math.max(0, Math.min(1, weight)) * 100;
  return svg(
    "svg",
    { viewBox: "0 0 100 8", class: "cell", "aria-hidden": "true", preserveAspectRatio: "none" },
    svg("rect", { x: 100 - width, y: 0, width, height: 8 }),
  );
}
