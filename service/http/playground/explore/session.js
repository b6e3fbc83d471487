// The person who is looked at, and what was tried for them: events that are sent with each question and not stored.

import { post } from "../lib/api.js";

const NAME = "heed-trials";
const kept = JSON.parse(sessionStorage.getItem(NAME)) ?? {}; // user id -> events
const watchers = [];
let user = "";

export const current = () => user;
export const trials = () => kept[user] ?? [];
export const onChange = (watch) => watchers.push(watch);

// Who asks: the person with their stored history, and over it what was tried.
export function requester() {
  if (!user) return {};
  const history = trials().map(({ item_id, type, timestamp }) => ({ item_id, type, timestamp }));
  return history.length ? { user_id: user, history } : { user_id: user };
}

export async function choose(id) {
  user = id;
  await changed();
}

export async function add(item, type) {
  keep([{ item_id: item.item_id, title: item.title || item.item_id, type, timestamp: new Date().toISOString() }, ...trials()]);
  await changed();
}

export async function remove(trial) {
  keep(trials().filter((one) => one !== trial));
  await changed();
}

// Store what was tried as events of the person.
export async function record(some) {
  const events = some.map(({ item_id, type, timestamp }) => ({ user_id: user, item_id, type, timestamp }));
  await post("v1/events", { events });
  keep(trials().filter((one) => !some.includes(one)));
  await changed();
}

function keep(events) {
  if (events.length) kept[user] = events;
  else delete kept[user];
  sessionStorage.setItem(NAME, JSON.stringify(kept));
}

export async function changed() {
  await Promise.all(watchers.map((watch) => watch()));
}
