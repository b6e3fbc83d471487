// The person: who they are, what they did, and what is tried for them.

import { get, userPath } from "../lib/api.js";
import { $, button, debounced, el, trouble } from "../lib/dom.js";
import { avatar, counted, when } from "../lib/format.js";
import { learn, name, titleOf } from "../lib/titles.js";
import { link } from "../shell/tabs.js";
import * as session from "./session.js";

const CANDIDATES = 20; // users of whom one with a history is picked
const ENOUGH = 30; // events, from which a history is not longer for that choice
const SHOWN = 50; // events
let usual = "view"; // what the person does most

export function begin(user) {
  session.onChange(show);
  $("choose").addEventListener("submit", () => choose($("user").value.trim()));
  $("guest").addEventListener("click", () => choose(`guest-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`));
  $("record-all").addEventListener("click", () => session.record(session.trials()).catch(trouble));
  $("user").addEventListener("input", debounced(() => offer().catch(trouble), 100));
  return user ? choose(user) : pick();
}

export async function choose(id) {
  $("user").value = id;
  try {
    await session.choose(id);
    trouble();
  } catch (error) {
    trouble(error);
  }
}

// Try an item for the person: a trial, or an event if it is asked for.
export async function attempt(item) {
  try {
    if (!session.current()) {
      $("user").focus();
      throw new Error("Choose a user first, or make a guest.");
    }
    learn([item]);
    await session.add(item, usual);
    if ($("record").checked) await session.record(session.trials().slice(0, 1));
    trouble();
  } catch (error) {
    trouble(error);
  }
}

// The page opens on somebody who has a history, the longest of the first users that fits on a page.
async function pick() {
  try {
    const users = await offer();
    const lengths = users.map(({ events }) => Math.min(events, ENOUGH));
    if (session.current() || $("user").value || document.activeElement === $("user")) return; // nobody who chooses is interrupted
    const best = lengths.indexOf(Math.max(...lengths));
    if (lengths[best] > 0) return void (await choose(users[best].user_id));
    $("person-note").textContent = "No history to show: choose a user, or make a guest and try something.";
    await session.changed();
  } catch (error) {
    trouble(error);
  }
}

// The users whose id begins with what is typed.
async function offer() {
  const { users } = await get(`v1/users?counts=true&limit=${CANDIDATES}&prefix=${encodeURIComponent($("user").value.trim())}`);
  $("users").replaceChildren(...users.map(({ user_id: id }) => el("option", { value: id })));
  return users;
}

async function show() {
  const user = session.current();
  if (!user) return;
  const { events, cursor } = await get(`${userPath(user)}/history?limit=${SHOWN}`);
  await name(events.map((event) => event.item_id));
  if (user !== session.current()) return;
  usual = mostFrequent(events.map((event) => event.type)) ?? "view";
  const trials = session.trials();
  $("person-title").textContent = user;
  $("person").querySelector(".avatar").replaceWith(avatar(user));
  $("person-link").href = link("people", user);
  $("person-link").hidden = false;
  $("person-note").replaceChildren(
    ...(events.length
      ? [`${cursor ? `More than ${SHOWN} events` : counted(events.length, "event")}, the last on `, when(events[0].timestamp, 10), "."]
      : ["No event yet: answers come from what is popular. Try something."]),
  );
  $("trials").hidden = !trials.length;
  $("trials-note").textContent = `${counted(trials.length, "trial")}: answers take ${trials.length === 1 ? "it" : "them"} into account, and nothing is stored.`;
  $("history").replaceChildren(...trials.map(trial), ...events.map(stored));
  $("person").dataset.shown = user;
}

function mostFrequent(words) {
  const counts = new Map();
  for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1])[0]?.[0];
}

const stored = (event) =>
  el("li", {}, el("span", { class: "what" }, el("span", { class: "type" }, event.type), " ", titleOf(event.item_id)), when(event.timestamp, 10));

function trial(event) {
  const title = event.title;
  return el(
    "li",
    { class: "trial" },
    el("span", { class: "what" }, el("span", { class: "badge" }, "trial"), " ", el("span", { class: "type" }, event.type), " ", title),
    button("Record", () => session.record([event]).catch(trouble), { "aria-label": `Record as an event: ${event.type} ${title}` }),
    button("×", () => session.remove(event).catch(trouble), { "aria-label": `Drop the trial ${event.type} ${title}` }),
  );
}
