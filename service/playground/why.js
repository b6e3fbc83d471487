// Why a target has its score: what it is made of, and where each head attends.

import { post } from "./api.js";
import { $, el, number, percent, signed, svg, trouble } from "./dom.js";

const EVENTS = 50;
const SHOWN = 12; // events in each table; the others are added up
let target;
let named; // event id -> what it was about

export function begin({ user, about }) {
  named = about;
  const again = () => target && explain(target, user());
  $("how").addEventListener("change", again);
  $("temperature").addEventListener("input", () => ($("temperature-shown").value = number(temperature(), 2)));
  return {
    open: (item) => {
      target = item;
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
    made(found);
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

// The parts and the events, each with its share, and a last row that is their sum.
function made(found) {
  const parts = found.parts ?? {};
  const events = [...(found.explanation ?? [])].sort((a, b) => Math.abs(b.contribution) - Math.abs(a.contribution));
  const shown = events.slice(0, SHOWN);
  const told = shown.reduce((sum, row) => sum + row.contribution, 0);
  const rest = (parts.attention ?? 0) + (parts.transitions ?? 0) - told;
  const rows = [
    ["the order of the history", parts.sequence ?? 0],
    ["how popular it is", parts.prior ?? 0],
    ...shown.map((row) => [`${row.type || "interest"}: ${row.title || row.item_id}`, row.contribution, row.without]),
  ];
  if (Math.abs(rest) > 5e-4) rows.push(["all other events", rest]);
  const largest = Math.max(...rows.map(([, value]) => Math.abs(value)));
  const sum = rows.reduce((total, [, value]) => total + value, 0);
  $("contributions").replaceChildren(
    el("caption", {}, "Each row adds to the score or takes from it; together they are the score."),
    el("thead", {}, el("tr", {}, head("part"), head("share"), head("adds", true), head("score without", true))),
    el(
      "tbody",
      {},
      ...rows.map(([name, value, without]) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, name),
          el("td", { class: "signed" }, signed(value, largest)),
          el("td", { class: "number", "data-adds": value }, number(value)),
          el("td", { class: "number" }, without === undefined ? "" : number(without)),
        ),
      ),
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
