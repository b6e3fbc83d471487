// A user: their history as a timeline, and what is recommended to them.

import { ask, get, post } from "./api.js";
import { $, el, number, trouble, when } from "./dom.js";

const LIMIT = 6;
const LEAST = 5e-4; // of a contribution that is a reason: less is shown as 0.000
const TRIED = 5; // users who are looked at for one with a history
const titles = new Map(); // item id -> title, as far as answers have told
const named = new Map(); // event id -> what it was about
let current = "";

export const user = () => current;
export const about = (event) => named.get(event);

export function begin({ card, changed }) {
  $("choose").addEventListener("submit", (event) => {
    event.preventDefault();
    choose($("user").value, card, changed);
  });
  $("guest").addEventListener("click", () => {
    $("user").value = `guest-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
    choose($("user").value, card, changed);
  });
  offer(card, changed);
  return {
    watch: (item) => act(() => watch(item), card, changed),
    refresh: () => act(async () => {}, card, changed),
  };
}

// Users to choose from. The page opens on the first of them who has a history.
async function offer(card, changed) {
  try {
    const { users } = await get("v1/users?limit=50");
    $("users").replaceChildren(...users.map(({ user_id: id }) => el("option", { value: id })));
    for (const { user_id: id } of users.slice(0, TRIED)) {
      const { events } = await get(`${path(id)}/history?limit=1`);
      // Whoever chooses, or is about to, is not interrupted.
      if (current || $("user").value || document.activeElement === $("user")) return;
      if (!events.length) continue;
      $("user").value = id;
      return void (await choose(id, card, changed));
    }
    $("person-note").textContent = "No history to show: choose a user, or make a guest and watch something.";
  } catch (error) {
    trouble(error);
  }
}

async function choose(id, card, changed) {
  current = id;
  $("personal").disabled = !id;
  await act(async () => {}, card, changed);
}

// Something that changes what is known of the user, and then everything that follows from it.
async function act(work, card, changed) {
  if (!current) return;
  try {
    await work();
    const user = current;
    await Promise.all([history(user, card, changed), recommend(user, card)]);
    if (user !== current) return;
    trouble();
    $("person").dataset.shown = user;
    changed();
  } catch (error) {
    trouble(error);
  }
}

async function watch(item) {
  if (!current) {
    $("user").focus();
    throw new Error("Choose a user first, or make a guest.");
  }
  titles.set(item.item_id, item.title);
  await post("v1/events", { events: [{ user_id: current, item_id: item.item_id, type: "watch" }] });
}

const path = (id) => `v1/users/${encodeURIComponent(id)}`;

async function history(user, card, changed) {
  const { events, cursor } = await get(`${path(user)}/history?limit=50`);
  await name(events.map((event) => event.item_id));
  if (user !== current) return;
  for (const event of events) named.set(event.event_id, titles.get(event.item_id) || event.item_id);
  $("person-note").textContent = events.length
    ? `${cursor ? "The newest " : ""}${events.length} events.`
    : "No event yet: answers come from what is popular. Watch something.";
  $("history").replaceChildren(
    ...events.map((event) => {
      const title = titles.get(event.item_id) || event.item_id;
      return el(
        "li",
        {},
        el("span", { class: "what" }, `${event.type} ${title}`),
        when(event.timestamp),
        el(
          "button",
          { type: "button", "aria-label": `Forget ${event.type} ${title}`, onclick: () => forget(event, card, changed) },
          "×",
        ),
      );
    }),
  );
}

async function forget(event, card, changed) {
  const gone = `${path(current)}/history/${encodeURIComponent(event.event_id)}`;
  await act(() => ask("DELETE", gone), card, changed);
}

async function recommend(user, card) {
  const answer = await post("v1/recommend", { user_id: user, limit: LIMIT, explain: 2 });
  for (const item of answer.items) titles.set(item.item_id, item.title);
  await name(answer.items.flatMap((item) => (item.explanation ?? []).map((row) => row.item_id)));
  if (user !== current) return;
  $("recommended").replaceChildren(...answer.items.map((item) => recommended(item, card)));
}

const REASONS = {
  personal: "from their history, by the trained model",
  content: "from what their history is about; no model is trained",
  popular: "popular: nothing is known of the user",
};

function recommended(item, card) {
  const raising = (item.explanation ?? []).filter((row) => row.contribution >= LEAST);
  const because = raising.map((row) => row.title || titles.get(row.item_id) || row.item_id);
  return card(item, {
    title: [item.title || item.item_id],
    details: [
      el("p", {}, `score ${number(item.score)}, ${REASONS[item.reason] ?? item.reason}`),
      because.length ? el("p", {}, `because of ${because.join(" and ")}`) : null,
    ],
  });
}

// Titles of items that no answer has told yet.
async function name(ids) {
  const unknown = [...new Set(ids)].filter((id) => id && !titles.has(id)).slice(0, 100);
  if (!unknown.length) return;
  const requests = unknown.map((id) => ({ path: `/v1/items/${encodeURIComponent(id)}` }));
  const { responses } = await post("v1/batch", { requests });
  unknown.forEach((id, at) => titles.set(id, responses[at].body.title ?? "")); // "": events alone know it
}
