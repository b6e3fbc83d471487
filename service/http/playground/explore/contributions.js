// The table of a score: every part and every event adds to it or takes from it, and together they are the score.

import { signed } from "../lib/bars.js";
import { $, button, el, head, trouble } from "../lib/dom.js";
import { number } from "../lib/format.js";
import { partName, reasonKey, reasonName } from "./reasons.js";

const OF_EVENTS = new Set(["attention", "transitions", "similarity"]); // parts that the events share among them

// `exact()` answers the score without the events of each reason, by `reasonKey`.
export function contributions(found, limit, exact) {
  const parts = Object.entries(found.parts ?? {});
  const events = (found.explanation ?? []).slice(0, limit);
  const told = events.reduce((sum, row) => sum + row.contribution, 0);
  const rest = parts.reduce((sum, [name, value]) => sum + (OF_EVENTS.has(name) ? value : 0), 0) - told;
  const rows = [
    ...parts.filter(([name]) => !OF_EVENTS.has(name)).map(([name, value]) => [partName(name), value]),
    ...events.map((row) => [reasonName(row), row.contribution, row]),
  ];
  if (Math.abs(rest) > 5e-4) rows.push(["all other events", rest]);
  const largest = Math.max(...rows.map(([, value]) => Math.abs(value)));
  const sum = rows.reduce((total, [, value]) => total + value, 0);
  $("contributions").replaceChildren(
    el("caption", {}, "Each row adds to the score or takes from it, and together they are the score. Events that raise it share " +
      "equally what they only add together. Without it: the score had that event never happened; ≈ is an estimate."),
    el("thead", {}, el("tr", {}, head("part"), head("share"), head("adds", true), head("without it", true))),
    el("tbody", {}, rows.map(([name, value, event]) => line(name, value, event, found, largest, exact)), total(found, sum)),
  );
}

function line(name, value, event, found, largest, exact) {
  const bars = el("td", { class: "signed" }, signed(value, largest));
  const known = event && typeof event.effect === "number";
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, name, event?.event_id ? without(name, event, found, bars, largest, exact) : null),
    bars,
    el("td", { class: "number", "data-adds": value }, number(value)),
    el("td", { class: "number" }, known ? `${event.effect_is_exact ? "" : "≈ "}${number(found.score - event.effect)}` : ""),
  );
}

const total = (found, sum) =>
  el(
    "tr",
    { class: "total" },
    el("th", { scope: "row" }, "the score"),
    el("td", {}),
    el("td", { class: "number", "data-score": found.score, "data-sum": sum }, number(sum)),
    el("td", {}),
  );

// A button that tells the score had an event never happened, and what is told: a bar and a line.
function without(name, event, found, bars, largest, exact) {
  const told = el("span", { class: "told" });
  const press = async () => {
    try {
      const score = (await exact()).get(reasonKey(event));
      if (!pressed.isConnected || pressed.getAttribute("aria-pressed") === "true") return;
      const change = score - found.score;
      told.textContent = `without it ${number(score)} (${change < 0 ? "" : "+"}${number(change)})`;
      told.dataset.without = score;
      const bar = signed(-change, largest);
      bar.classList.add("never");
      bars.append(bar);
      pressed.setAttribute("aria-pressed", "true");
      $("why-note").textContent = `Had ${name} never happened, the score would be ${number(score)} instead of ${number(found.score)}.`;
    } catch (error) {
      trouble(error);
    }
  };
  const pressed = button("leave out", press, { "aria-pressed": "false", "aria-label": `Score without ${name}` });
  return el("span", { class: "leave" }, pressed, told);
}
