// Why a target has its score: what it is made of, and where each head attends.

import { post } from "./api.js";
import { $, el, number, percent, remembered, signed, svg, trouble } from "./dom.js";

const EVENTS = 50;
const SHOWN = 12; // events in each table, unless all are asked for; the others are added up
let target;
let every = false; // whether all events that were named are shown
let named; // event id -> what it was about

export function begin({ user, about }) {
  named = about;
  const again = () => target && explain(target, user());
  $("how").addEventListener("change", again);
  $("more").addEventListener("click", () => {
    every = !every;
    again();
  });
  $("temperature").addEventListener("input", () => ($("temperature-shown").value = number(temperature(), 2)));
  return {
    open: (item) => {
      target = item;
      every = false;
      $("why").hidden = false;
      $("why-title").focus();
      explain(item, user());
    },
    again,
  };
}

const temperature = () => 10 ** Number($("temperature").value);

async function explain(item, user) {
  if (!user) {
    $("why-note").textContent = "Choose a user first: a score is somebody's.";
    return;
  }
  const mode = new FormData($("how")).get("mode");
  const how = { user_id: user, temperature: temperature(), hard: mode === "hard" };
  how.retrieval = { mode: mode === "coarse" ? "coarse" : "exact" };
  try {
    const [scored, map] = await Promise.all([
      post("v1/score", { ...how, item_ids: [item.item_id], explain: EVENTS }),
      attention(how, item),
    ]);
    const [found] = scored.items;
    $("why-title").textContent = `Why ${found.title || item.item_id}`;
    $("why-note").textContent =
      `Score ${number(found.score)} for ${user}` +
      (found.mass === undefined ? "." : `; ${percent(found.mass)} of the softmax was attended.`);
    made(found, remembered(() => leftOut(how, item, shown(found).length)));
    draw(map, found.explanation ?? []);
    trouble();
  } catch (error) {
    trouble(error);
  }
}

// The weights of each head; null where there is nothing to attend to.
async function attention(how, item) {
  const { user_id, ...rest } = how;
  const memory = { user_id };
  return post("v1/attend", { ...rest, memory, query: { item_id: item.item_id }, limit: EVENTS });
}

// The score had an event never happened, by event id, of the first few that moved it.
async function leftOut(how, item, count) {
  const asked = { ...how, item_ids: [item.item_id], explain: count, explain_exact: true };
  const [found] = (await post("v1/score", asked)).items;
  return new Map(found.explanation.map((row) => [row.event_id, found.score - row.effect]));
}

// The events in the table: those that raise the score come first, then those that lower it.
const shown = (found) => (found.explanation ?? []).slice(0, every ? EVENTS : SHOWN);

// The parts and the events, each with its share, and a last row that is their sum.
function made(found, exact) {
  const parts = found.parts ?? {};
  const events = shown(found);
  const told = events.reduce((sum, row) => sum + row.contribution, 0);
  const rest = (parts.attention ?? 0) + (parts.transitions ?? 0) - told;
  const rows = [
    ["how popular it is", parts.prior ?? 0],
    ...events.map((row) => [`${row.type || "interest"}: ${row.title || row.item_id}`, row.contribution, row]),
  ];
  const all = found.explanation?.length ?? 0;
  $("more").hidden = all <= SHOWN;
  $("more").textContent = every ? `Show the first ${SHOWN}` : `Show all ${all} events`;
  if (Math.abs(rest) > 5e-4) rows.push(["all other events", rest]);
  const largest = Math.max(...rows.map(([, value]) => Math.abs(value)));
  const sum = rows.reduce((total, [, value]) => total + value, 0);
  $("contributions").replaceChildren(
    el("caption", {}, "Adds: how the score is made up. Each row adds to it or takes from it, and together they are the score; " +
      "events that raise it share equally what they only add together. " +
      "Without it: the score had that event never happened, so that later events would be read without it too; ≈ is an estimate. " +
      "Leave an event out to compute it."),
    el("thead", {}, el("tr", {}, head("part"), head("share"), head("adds", true), head("without it", true))),
    el(
      "tbody",
      {},
      ...rows.map(([name, value, event]) => {
        const bars = el("td", { class: "signed" }, signed(value, largest));
        return el(
          "tr",
          {},
          el("th", { scope: "row" }, name, ...(event?.event_id ? without(name, event, found, bars, largest, exact) : [])),
          bars,
          el("td", { class: "number", "data-adds": value }, number(value)),
          el("td", { class: "number" }, event === undefined ? "" : `${event.effect_is_exact ? "" : "≈ "}${number(found.score - event.effect)}`),
        );
      }),
      el(
        "tr",
        { class: "total" },
        el("th", { scope: "row" }, "the score"),
        el("td", {}),
        el("td", { class: "number", "data-score": found.score, "data-sum": sum }, number(sum)),
        el("td", {}),
      ),
    ),
  );
}

// A button that tells the score had an event never happened, and what is told: a bar and a line.
function without(name, event, found, bars, largest, exact) {
  const told = el("span", { class: "told" });
  const press = async () => {
    try {
      const score = (await exact()).get(event.event_id);
      if (!button.isConnected || button.getAttribute("aria-pressed") === "true") return;
      const change = score - found.score;
      told.textContent = `without it ${number(score)} (${change < 0 ? "" : "+"}${number(change)})`;
      told.dataset.without = score;
      const bar = signed(-change, largest);
      bar.classList.add("never");
      bars.append(bar);
      button.setAttribute("aria-pressed", "true");
      $("why-note").textContent = `Had ${name} never happened, the score would be ${number(score)} instead of ${number(found.score)}.`;
    } catch (error) {
      trouble(error);
    }
  };
  const button = el("button", { type: "button", "aria-pressed": "false", "aria-label": `Score without ${name}`, onclick: press }, "leave out");
  return [el("span", { class: "leave" }, button, told)];
}

const head = (text, numeric) => el("th", { scope: "col", class: numeric ? "number" : null }, text);

// Events down, heads across; a cell's bar is as long as its weight is large.
function draw(map, explained) {
  const titles = new Map(explained.map((row) => [row.event_id, row.title || row.item_id]));
  const shown = map.rows.slice(0, SHOWN).map((_, at) => at);
  if (!shown.length) {
    $("attention").replaceChildren(el("caption", {}, "There is nothing to attend to."));
    return;
  }
  const name = (at) => titles.get(map.ids?.[at]) ?? named(map.ids?.[at]) ?? map.ids?.[at] ?? "interest";
  $("attention").replaceChildren(
    el("caption", {}, `The ${shown.length} rows of most weight.`),
    el("thead", {}, el("tr", {}, head("event"), ...map.weights.map((_, at) => head(`head ${at + 1}`)))),
    el(
      "tbody",
      {},
      ...shown.map((at) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, name(at)),
          ...map.weights.map((weights) => el("td", {}, percent(weights[at]), cell(weights[at]))),
        ),
      ),
    ),
  );
}

function cell(weight) {
  const width = Math.max(0, Math.min(1, weight)) * 100;
  return svg(
    "svg",
    { viewBox: "0 0 100 8", class: "cell", "aria-hidden": "true", preserveAspectRatio: "none" },
    svg("rect", { x: 100 - width, y: 0, width, height: 8 }),
  );
}
