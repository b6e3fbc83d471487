// Why a target has its score: a sentence, then what it is made of, then where each head attends.

import { post } from "../lib/api.js";
import { $, el, remembered, trouble } from "../lib/dom.js";
import { number, percent } from "../lib/format.js";
import { name } from "../lib/titles.js";
import { attentionTable } from "./attention_table.js";
import { contributions } from "./contributions.js";
import { reasonKey, sentence } from "./reasons.js";
import * as session from "./session.js";

const EVENTS = 50;
const SHOWN = 12; // events in each table, unless all are asked for; the others are added up
let target;
let running;
let every = false; // whether all events that were named are shown

export function begin() {
  $("how").addEventListener("change", again);
  $("more").addEventListener("click", () => {
    every = !every;
    again();
  });
  $("temperature").addEventListener("input", () => ($("temperature-shown").value = number(temperature(), 2)));
  $("why-close").addEventListener("click", () => $("why").close());
  $("why").addEventListener("close", () => {
    running?.abort();
    target = null;
  });
}

export function open(item) {
  target = item;
  every = false;
  $("why-title").textContent = `Why ${item.title || item.item_id}`;
  for (const place of ["why-sentence", "why-note", "contributions", "attention"]) $(place).replaceChildren();
  $("why").showModal();
  $("why-title").focus();
  return explain(item);
}

export const again = () => target && explain(target);

const temperature = () => 10 ** Number($("temperature").value);

// Ask why an item has its score: the latest question is answered, whatever comes in late.
async function explain(item) {
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  const user = session.current();
  if (!user) {
    $("why-sentence").textContent = "Choose a user first: a score is somebody's.";
    return;
  }
  const mode = new FormData($("how")).get("mode");
  const how = { ...session.requester(), temperature: temperature(), hard: mode === "hard", retrieval: { mode: mode === "coarse" ? "coarse" : "exact" } };
  try {
    const [scored, map] = await Promise.all([
      post("v1/score", { ...how, item_ids: [item.item_id], explain: EVENTS }, { signal }),
      attention(how, item, signal),
    ]);
    const [found] = scored.items;
    await name((found.explanation ?? []).map((row) => row.item_id));
    if (signal.aborted) return;
    $("why-sentence").textContent = sentence({ ...found, reason: found.explanation?.length ? found.reason : item.reason ?? "popular" });
    $("why-note").textContent =
      `Score ${number(found.score)} for ${user}` + (found.mass === undefined ? "." : `; ${percent(found.mass)} of the softmax was attended.`);
    const limit = every ? EVENTS : SHOWN;
    contributions(found, limit, remembered(() => leftOut(how, item, Math.min(limit, found.explanation?.length ?? 0))));
    more(found.explanation?.length ?? 0);
    $("attention").replaceChildren(...attentionTable(map, found.explanation ?? [], SHOWN, session.trials().length));
    trouble();
  } catch (error) {
    trouble(error);
  }
}

function more(all) {
  $("more").hidden = all <= SHOWN;
  $("more").textContent = every ? `Show the first ${SHOWN}` : `Show all ${all} events`;
}

// The weights of each head over the stored events; null where there is nothing to attend to.
async function attention(how, item, signal) {
  const { user_id, history, ...rest } = how; // trials are no rows of a stored memory
  return post("v1/attend", { ...rest, memory: { user_id }, query: { item_id: item.item_id }, limit: EVENTS }, { signal });
}

// The score had the events of a reason never happened, by `reasonKey`, of the first few that moved it.
async function leftOut(how, item, events) {
  const asked = { ...how, item_ids: [item.item_id], explain: events, explain_exact: true };
  const [found] = (await post("v1/score", asked)).items;
  return new Map(found.explanation.map((row) => [reasonKey(row), found.score - row.effect]));
}
