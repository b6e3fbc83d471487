// People: the list of those who have a history or a profile, and each of them.

import { after, get } from "../lib/api.js";
import { $, el, trouble } from "../lib/dom.js";
import { counted } from "../lib/format.js";
import { address, go, link, split } from "../shell/tabs.js";
import { showPerson } from "./person_page.js";

const PAGE = 50;
let begun = false;
let cursor = null;

export async function open(user) {
  if (!begun) begin();
  split("people", user);
  for (const each of $("people-list").querySelectorAll("a")) mark(each, user);
  if (user) await showPerson(user, reload).catch(trouble);
}

function begin() {
  begun = true;
  $("find-person").addEventListener("submit", () => {
    if ($("person-id").value.trim()) go("people", $("person-id").value.trim());
  });
  $("more-people").addEventListener("click", () => load().catch(trouble));
  reload().catch(trouble);
}

async function reload() {
  cursor = null;
  $("people-list").replaceChildren();
  await load();
}

async function load() {
  const page = await get(`v1/users?limit=${PAGE}${after(cursor)}`);
  ({ cursor } = page);
  $("people-list").append(...page.users.map(row));
  $("more-people").hidden = !cursor;
  const shown = $("people-list").children.length;
  $("people-note").textContent = shown ? `${cursor ? "The first " : ""}${counted(shown, "user")}.` : "Nobody yet: a user is there with their first event. POST /v1/events, or heed import events.";
}

function row({ user_id: id, interests }) {
  const made = el("a", { href: link("people", id) }, el("span", { class: "who" }, id), interests.length ? el("span", { class: "beside" }, interests.join(", ")) : null);
  mark(made, address()[1]);
  return el("li", {}, made);
}

const mark = (made, user) => (made.getAttribute("href") === link("people", user) ? made.setAttribute("aria-current", "true") : made.removeAttribute("aria-current"));
