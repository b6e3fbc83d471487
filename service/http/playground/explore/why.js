// Why a target has its score: a sentence, then the answer as a picture, then what each event adds.

import { post } from "../lib/api.js";
import { $, remembered, trouble } from "../lib/dom.js";
import { number, percent } from "../lib/format.js";
import { learn, name } from "../lib/titles.js";
import { contributions } from "./contributions.js";
import { cells, history } from "./memory.js";
import * as picture from "./picture.js";
import { reasonKey, sentence } from "./reasons.js";
import * as session from "./session.js";

const EVENTS = 50;
const SHOWN = 12; // events in the table, unless all are asked for; the others are added up
const ROWS = 1000; // most rows of a memory that an answer names
let target;
let running;
let every = false; // whether all events that were named are shown

let events; // of the person, asked for once

export function begin() {
  picture.begin();
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
  events = remembered(() => history(session.current()));
  $("asked-by").hidden = !$("query").value.trim();
  $("how").elements.by.value = "item";
  $("picture").hidden = true;
  $("why-title").textContent = `Why ${item.title || item.item_id}`;
  for (const place of ["why-sentence", "why-note", "contributions"]) $(place).replaceChildren();
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
  const form = new FormData($("how"));
  const keys = Number(form.get("mode")) || undefined; // that FAISS retrieves
  const words = form.get("by") === "text" ? $("query").value.trim() : "";
  const how = { ...session.requester(), temperature: temperature(), hard: form.get("mode") === "hard", retrieval: keys ? { mode: "coarse", k: keys } : { mode: "exact" } };
  try {
    const [scored, map, past] = await Promise.all([
      post("v1/score", { ...how, item_ids: [item.item_id], explain: EVENTS }, { signal }),
      attention(how, words ? { text: words } : { item_id: item.item_id }, signal),
      events(),
    ]);
    const [found] = scored.items;
    await name((found.explanation ?? []).map((row) => row.item_id));
    if (signal.aborted) return;
    $("why-sentence").textContent = sentence({ ...found, reason: found.explanation?.length ? found.reason : item.reason ?? "popular" });
    $("why-note").textContent =
      `Score ${number(found.score)} for ${user}` + (found.mass === undefined ? "." : `; ${percent(found.mass)} of the attention is counted.`);
    const limit = every ? EVENTS : SHOWN;
    contributions(found, limit, remembered(() => leftOut(how, item, Math.min(limit, found.explanation?.length ?? 0))));
    more(found.explanation?.length ?? 0);
    learn(map.events);
    const trials = session.trials().length;
    const asked = { title: words ? `“${words}”` : item.title || item.item_id, words, user, keys, hard: how.hard, trials };
    $("picture").hidden = false;
    picture.draw(asked, cells(past, map), map, words ? null : found);
    trouble();
  } catch (error) {
    trouble(error);
  }
}

function more(all) {
  $("more").hidden = all <= SHOWN;
  $("more").textContent = every ? `Show the first ${SHOWN}` : `Show all ${all} events`;
}

// The weights of each head over the stored events. Typed words ask without the state of the person, which would drown them.
async function attention(how, query, signal) {
  const { user_id, history, ...rest } = how; // trials are no rows of a stored memory
  return post("v1/attend", { ...rest, memory: { user_id }, query, state: !query.text, limit: ROWS }, { signal });
}

// The score had the events of a reason never happened, by `reasonKey`, of the first few that moved it.
async function leftOut(how, item, events) {
  const asked = { ...how, item_ids: [item.item_id], explain: events, explain_exact: true };
  const [found] = (await post("v1/score", asked)).items;
  return new Map(found.explanation.map((row) => [reasonKey(row), found.score - row.effect]));
}
