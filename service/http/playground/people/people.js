// People: the list of those who have a history or a profile, and each of them.

import { after, get } from "../lib/api.js";
import { $, debounced, el, trouble } from "../lib/dom.js";
import { avatar, counted } from "../lib/format.js";
import { address, go, link, split } from "../shell/tabs.js";
import { showPerson } from "./person_page.js";

const PAGE = 50;
const QUIET = 100; // milliseconds without a key
let begun = false;
let cursor = null;

export async function open(user) {
  if (!begun) begin();
  split("people", user, el("h2", {}, "Choose a person"), el("p", { class: "note" }, "Their page has their history and their profile, leads to what is recommended to them, and forgets them on request."));
  for (const each of $("people-list").querySelectorAll("a")) mark(each, user);
  if (user) await showPerson(user, reload).catch(trouble);
}

function begin() {
  begun = true;
  $("find-person").addEventListener("submit", () => {
    if ($("person-id").value.trim()) go("people", $("person-id").value.trim());
  });
  $("person-id").addEventListener("input", debounced(() => reload().catch(trouble), QUIET));
  $("more-people").addEventListener("click", () => load(cursor).catch(trouble));
  reload().catch(trouble);
}

const reload = () => load(null);

// The next page of those whose id begins with what is typed, or the first one; the latest question is answered.
async function load(from) {
  const begins = $("person-id").value.trim();
  const page = await get(`v1/users?counts=true&limit=${PAGE}&prefix=${encodeURIComponent(begins)}${after(from)}`);
  if (begins !== $("person-id").value.trim()) return;
  ({ cursor } = page);
  if (!from) $("people-list").replaceChildren();
  $("people-list").append(...page.users.map(row));
  $("more-people").hidden = !cursor;
  const shown = $("people-list").children.length;
  const none = begins ? `No id begins with “${begins}”.` : "Nobody yet: a user is there with their first event. POST /v1/events, or heed import events.";
  $("people-note").textContent = shown ? `${cursor ? "The first " : ""}${counted(shown, "user")}.` : none;
}

function row({ user_id: id, interests, events }) {
  const about = el("span", {}, el("span", { class: "who" }, id), el("span", { class: "beside" }, [counted(events, "event"), ...interests].join(", ")));
  const made = el("a", { href: link("people", id), "aria-label": id, class: "person" }, avatar(id), about);
  mark(made, address()[1]);
  return el("li", {}, made);
}

const mark = (made, user) => (made.getAttribute("href") === link("people", user) ? made.setAttribute("aria-current", "true") : made.removeAttribute("aria-current"));
