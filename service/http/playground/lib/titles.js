// Titles of items, as far as answers have told them.

import { batch } from "./api.js";

const titles = new Map(); // item id -> title; "" where events alone know the item
const AT_ONCE = 100;

export const titleOf = (id) => titles.get(id) || id;

export function learn(items) {
  for (const item of items) if (item.title) titles.set(item.item_id, item.title);
}

// Ask for the titles that no answer has told yet.
export async function name(ids) {
  const unknown = [...new Set(ids)].filter((id) => id && !titles.has(id));
  for (let at = 0; at < unknown.length; at += AT_ONCE) {
    const some = unknown.slice(at, at + AT_ONCE);
    const found = await batch(some.map((id) => ({ path: `/v1/items/${encodeURIComponent(id)}`, body: { plain: true } })));
    some.forEach((id, place) => titles.set(id, found[place]?.title ?? ""));
  }
}
