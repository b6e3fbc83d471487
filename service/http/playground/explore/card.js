// An item as a card: picture, name, price, why it is here, and what can be done about it.

import { button, el } from "../lib/dom.js";
import { hasPictures, shown } from "../lib/fields.js";

// `actions` are pairs of a word and what it does; each is named for the item too.
export function card(item, { title, details = [], actions = [] }) {
  const { name, url, price, subtitle, labels } = shown(item);
  const words = title ?? [name];
  return el(
    "li",
    { "data-item": item.item_id },
    picture(item),
    el(
      "div",
      { class: "about" },
      el("h3", {}, url ? el("a", { href: url, target: "_blank", rel: "noreferrer noopener" }, words) : words),
      subtitle || price ? el("p", { class: "beside" }, price ? el("strong", { class: "price" }, price) : null, price && subtitle ? " · " : null, subtitle) : null,
      labels.length ? el("dl", { class: "labels" }, labels.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))) : null,
      details,
      el("div", { class: "actions" }, actions.map(([word, act]) => button(word, act, { "aria-label": `${word} ${name}` }))),
    ),
  );
}

// A picture is fetched when it comes near the window; where there is none, its place holds the initial.
export function picture(item) {
  if (!hasPictures()) return null;
  const { name, image } = shown(item);
  const initial = () => el("span", { class: "picture initial", "aria-hidden": "true" }, [...name][0] ?? "");
  if (!image) return initial();
  const made = el("img", { class: "picture", src: image, alt: `Picture of ${name}`, loading: "lazy", decoding: "async", referrerpolicy: "no-referrer" });
  made.addEventListener("error", () => made.replaceWith(initial()));
  return made;
}
