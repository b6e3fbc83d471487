// A person's memory as the picture draws it: every event in the order of time, with the weight that each head gave it.

import { after, get, userPath } from "../lib/api.js";
import { titleOf } from "../lib/titles.js";

const PAGE = 1000;
const MOST = 20_000; // events: of a longer history the newest

// Every stored event of a person, oldest first.
export async function history(user) {
  const events = [];
  for (let cursor = ""; cursor !== null && events.length < MOST; ) {
    const page = await get(`${userPath(user)}/history?limit=${PAGE}${after(cursor)}`);
    events.push(...page.events);
    cursor = page.cursor ?? null;
  }
  return events.filter((event) => event.item_id).reverse();
}

// One cell for each event, and before them one for each entry of the profile: {title, type, timestamp, weights, mean}. A head
// that did not attend an event gives it no weight.
export function cells(events, map) {
  const at = new Map(map.ids.map((id, row) => [id || `row ${row}`, row])); // ids are missing while the database is away
  const none = map.weights.map(() => 0);
  const stored = events.map((event) => {
    const row = at.get(event.event_id);
    at.delete(event.event_id);
    return cell(event, map, row, none);
  });
  return [...[...at.values()].map((row) => cell(map.events[row], map, row, none)), ...stored];
}

function cell({ item_id, type, timestamp }, map, row, none) {
  const weights = row === undefined ? none : map.weights.map((head) => head[row]);
  const named = map.events[row];
  return {
    title: () => (named?.type === "hidden" ? "a hidden item" : named?.title || titleOf(item_id) || "an event"),
    item: item_id,
    type,
    timestamp,
    weights,
    mean: weights.reduce((sum, weight) => sum + weight, 0) / weights.length,
  };
}

// Neighbours share a bin if there are more cells than `most`; the weights of a bin are sums.
export function bins(all, most) {
  const size = Math.max(1, Math.ceil(all.length / most));
  return Array.from({ length: Math.ceil(all.length / size) }, (_, at) => {
    const some = all.slice(at * size, (at + 1) * size);
    return {
      some,
      best: some.reduce((best, one) => (one.mean > best.mean ? one : best)),
      weights: some[0].weights.map((_, head) => some.reduce((sum, one) => sum + one.weights[head], 0)),
      mean: some.reduce((sum, one) => sum + one.mean, 0),
    };
  });
}
