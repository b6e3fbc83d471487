// One person: profile, history page by page or searched, and forgetting.

import { matches } from "../explore/reasons.js";
import { after, ask, get, post, userPath } from "../lib/api.js";
import { confirmed } from "../lib/dialogs.js";
import { $, button, debounced, el, say, trouble } from "../lib/dom.js";
import { avatar, counted, marked, when } from "../lib/format.js";
import { jsonEditor } from "../lib/json_editor.js";
import { name, titleOf } from "../lib/titles.js";
import { go, link } from "../shell/tabs.js";

const PAGE = 50;
const QUIET = 25; // milliseconds without a key, as in Explore
const LEAST = 1e-3; // of the best event's weight: from there on an event matches
let current = null; // the view that is shown; what comes in for another is dropped
let cursor = null;

// `changed` is called when the list of people is another.
export async function showPerson(user, changed) {
  const view = (current = { user });
  cursor = null;
  const place = $("people-one");
  place.replaceChildren(
    el("p", { class: "back" }, el("a", { href: "#/people" }, "All people")),
    el("h2", { tabindex: "-1", id: "people-title" }, avatar(user), user),
    el("p", { class: "note", id: "people-summary" }),
    el(
      "div",
      { class: "actions" },
      el("a", { class: "action", href: link("explore", user) }, "Explore as this user"),
      button("Forget this user", () => forget(user, changed), { class: "danger" }),
    ),
    el("div", { id: "people-profile" }),
    el("h3", {}, "History"),
    searchForm(view),
    el("p", { id: "people-found-note", class: "note", role: "status", hidden: true }),
    el("ol", { id: "people-found", class: "timeline", hidden: true }),
    el("ol", { id: "people-history", class: "timeline" }),
    button("Show earlier events", () => older(view).catch(trouble), { id: "older", hidden: true }),
  );
  await Promise.all([profile(view), older(view)]);
}

async function profile(view) {
  const { user } = view;
  const { attributes, interests } = await get(userPath(user)).catch((error) => {
    if (error.status === 404) return { attributes: {}, interests: [] };
    throw error;
  });
  if (view !== current) return;
  const known = Object.entries(attributes).map(([key, value]) => [key, typeof value === "string" ? value : JSON.stringify(value)]);
  const save = async (value) => {
    await ask("PUT", userPath(user), value);
    say("The profile is saved.");
    await profile(view);
  };
  $("people-profile").replaceChildren(
    el("h3", {}, "Profile"),
    known.length || interests.length
      ? el("dl", { class: "labels" }, [["interests", interests.join(", ") || "none"], ...known].map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))))
      : el("p", { class: "note" }, "No profile. Interests, categories or item ids, count like events: also for those who have none."),
    el("details", {}, el("summary", {}, "Edit the profile"), jsonEditor({ label: "Profile as JSON", value: { attributes, interests }, save, rows: 8 })),
  );
}

async function older(view) {
  const { user } = view;
  const page = await get(`${userPath(user)}/history?limit=${PAGE}${after(cursor)}`);
  await name(page.events.map((event) => event.item_id));
  if (view !== current) return;
  ({ cursor } = page);
  $("people-history").append(...page.events.map((event) => row(user, event)));
  $("older").hidden = !cursor;
  summarize();
}

function searchForm(view) {
  const box = el("input", { id: "people-query", type: "search", autocomplete: "off", spellcheck: "false", maxlength: "20000", placeholder: "words, or what it was about" });
  const now = () => search(view, box.value).catch(trouble);
  box.addEventListener("input", debounced(now, QUIET));
  return el("form", { role: "search", "aria-label": "History", onsubmit: now }, el("label", { for: "people-query" }, "Search this history"), box);
}

// The events that match in place of the history; without a query, the history again.
async function search(view, query) {
  view.search?.abort();
  const { signal } = (view.search = new AbortController());
  const isSearch = query.trim() !== "";
  const answer = isSearch ? await post("v1/search", { memory: "history", user_id: view.user, query, limit: PAGE, highlight: true }, { signal }) : { events: [] };
  if (view !== current || signal.aborted) return;
  const found = answer.events.filter(({ weight }) => weight >= LEAST * answer.events[0].weight);
  const best = found.length === PAGE ? "The best " : "";
  $("people-found-note").textContent = found.length ? `${best}${counted(found.length, "event")}, the best match first.` : (answer.warnings ?? []).map(({ detail }) => detail).join(" ");
  $("people-found").replaceChildren(...found.map((event) => row(view.user, event, marked(event.highlights?.title, event.title || event.item_id), matches(event))));
  for (const id of ["people-found", "people-found-note"]) $(id).hidden = !isSearch;
  $("people-history").hidden = isSearch;
  $("older").hidden = isSearch || !cursor;
}

function summarize() {
  const shown = $("people-history").children.length;
  $("people-summary").textContent = shown ? `${cursor ? "The newest " : ""}${counted(shown, "event")}.` : "No event is stored.";
}

// An event; if it was searched for, `shown` is its title with marks, and `why` says where it matched.
function row(user, event, shown, why) {
  const title = event.title || titleOf(event.item_id);
  const drop = async () => {
    if (!(await confirmed("Forget this event?", `${event.type} ${title}. It cannot be brought back.`, "Forget it"))) return;
    try {
      await ask("DELETE", `${userPath(user)}/history/${encodeURIComponent(event.event_id)}`);
      for (const one of $("people-one").querySelectorAll("[data-event]")) if (one.dataset.event === event.event_id) one.remove();
      summarize();
    } catch (error) {
      trouble(error);
    }
  };
  return el(
    "li",
    { "data-event": event.event_id },
    el("span", { class: "what" }, el("span", { class: "type" }, event.type), " ", shown ?? title, why ? el("span", { class: "beside" }, ` ${why}`) : null),
    when(event.timestamp),
    button("×", drop, { "aria-label": `Forget ${event.type} ${title}` }),
  );
}

async function forget(user, changed) {
  const text = `All events and the profile of ${user} are deleted, for good. A model that was trained on them stays as it is until the next training.`;
  if (!(await confirmed(`Forget ${user}?`, text, "Forget everything"))) return;
  try {
    const { forgotten } = await ask("DELETE", userPath(user));
    say(`${user} is forgotten: ${counted(forgotten, "event")} deleted.`);
    go("people");
    await changed();
  } catch (error) {
    trouble(error);
  }
}
