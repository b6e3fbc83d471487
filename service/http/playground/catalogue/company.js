// What people do with an item: its events, what is like it and taken with it, and who would take it.

import { get, itemPath } from "../lib/api.js";
import { el, trouble } from "../lib/dom.js";
import { avatar, counted, when } from "../lib/format.js";
import { link } from "../shell/tabs.js";
import { sentence } from "../explore/reasons.js";

const SHOWN = 6;

// The panels of an item, each filled when its answer comes.
export const company = ({ item_id: id }) =>
  el(
    "div",
    { class: "panels" },
    panel("Events", async () => {
      const { events, total } = await get(`${itemPath(id)}/events?limit=${SHOWN}`);
      return [total > SHOWN ? el("p", { class: "note" }, `The newest of ${counted(total, "event")}.`) : "", ...list(events.map(event), "Nobody has done anything with it yet.")];
    }),
    panel("Similar", async () => list((await get(`${itemPath(id)}/similar?limit=${SHOWN}`)).items.map(other), "Nothing is similar to it.")),
    panel("Taken together with it", async () => {
      const { items } = await get(`${itemPath(id)}/together?relation=basket&limit=${SHOWN}`);
      return list(items.map((item) => other(item, item.support ? `${counted(item.support, "time")}, ${item.lift.toFixed(1)} × as often as by chance` : "by its text")), "Nothing is taken together with it.");
    }),
    panel("Who would take it next", async () => list((await get(`${itemPath(id)}/audience?limit=${SHOWN}&explain=2`)).users.map(person), "Nobody stands out yet.")),
  );

// A part with a heading; what its question is refused with is said in its place.
function panel(title, load) {
  const place = el("div", { class: "panel" }, el("h3", {}, title));
  load().then(
    (made) => place.append(...made),
    (error) => (error.status ? place.append(el("p", { class: "note" }, error.message)) : trouble(error)),
  );
  return place;
}

const list = (rows, none) => (rows.length ? [el("ul", { class: "list" }, rows)] : [el("p", { class: "note" }, none)]);

const row = (href, who, beside) => el("li", {}, el("a", { href }, el("span", { class: "who" }, who), beside ? el("span", { class: "beside" }, beside) : null));

const other = (item, beside) => row(link("catalogue", item.item_id), item.title || item.item_id, typeof beside === "string" && beside);

const event = ({ user_id: user, type, timestamp }) => row(link("people", user), user, [type, " ", when(timestamp, 10)]);

const person = (user) =>
  el("li", {}, el("a", { href: link("explore", user.user_id), class: "person" }, avatar(user.user_id), el("span", {}, el("span", { class: "who" }, user.user_id), el("span", { class: "beside" }, sentence(user).replace("Because you", "Because they")))));
