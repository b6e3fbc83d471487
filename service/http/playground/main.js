// The page: each part tells the others what changed.

import { el } from "./dom.js";
import * as key from "./key.js";
import * as person from "./person.js";
import * as running from "./running.js";
import * as search from "./search.js";
import * as stored from "./stored.js";
import * as why from "./why.js";

key.begin();
const explained = why.begin({ user: person.user, about: person.about });
let look = () => {};

// An item with what can be done about it.
function card(item, { title, details }) {
  const name = item.title || item.item_id;
  return el(
    "li",
    { "data-item": item.item_id },
    el("h3", {}, ...title),
    ...details,
    el(
      "div",
      { class: "actions" },
      el("button", { type: "button", "aria-label": `Watch ${name}`, onclick: () => someone.watch(item) }, "Watch"),
      el("button", { type: "button", "aria-label": `Why ${name}`, onclick: () => explained.open(item) }, "Why"),
    ),
  );
}

const someone = person.begin({
  card,
  changed: () => {
    look();
    explained.again();
    stored.refresh();
  },
});
stored.refresh();
look = search.begin({ user: person.user, card });
running.begin({ changed: () => someone.refresh() });
