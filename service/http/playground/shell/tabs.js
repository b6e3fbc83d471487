// Tabs with addresses: `#/people/ada` opens People at ada, and a reload keeps it. The slash keeps an address from being
// the id of an element, to which the browser would move the focus.

import { $ } from "../lib/dom.js";

const tabs = () => [...document.querySelectorAll('[role="tab"]')];
const nameOf = (tab) => tab.id.replace("tab-", "");
let opened = {};

// Opens the tab of the address, and calls `panels[name](rest)` with what follows the name.
export function begin(panels) {
  opened = panels;
  for (const tab of tabs()) {
    tab.addEventListener("click", () => go(nameOf(tab)));
    tab.addEventListener("keydown", walk);
  }
  addEventListener("hashchange", show);
  $("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address names the tab
    document.querySelector('[role="tabpanel"]:not([hidden])').focus();
  });
  show();
}

export const go = (name, rest = "") => (location.hash = rest ? link(name, rest) : `#/${name}`);

export const link = (name, rest) => `#/${name}/${encodeURIComponent(rest)}`;

// Shows the list of the tab `name`, and `one` entry of it; without one, a wide screen says what to do there.
export function split(name, one, ...hint) {
  $(name).dataset.one = one ? "yes" : "";
  if (!one) $(`${name}-one`).replaceChildren(...hint);
}

// The name of the tab that the address names, what follows it, and its parameters.
export function address() {
  const [path, more = ""] = location.hash.slice(2).split("?", 2);
  const [name, rest = ""] = path.split("/", 2);
  const parameters = new URLSearchParams(more);
  try {
    return [name, decodeURIComponent(rest), parameters];
  } catch {
    return [name, rest, parameters]; // an address may be typed
  }
}

function walk(event) {
  const all = tabs();
  const at = all.indexOf(event.currentTarget);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  const next = all.at(to % all.length);
  next.focus();
  go(nameOf(next));
}

function show() {
  const [wanted, rest, more] = address();
  const names = tabs().map(nameOf);
  const name = names.includes(wanted) ? wanted : names[0];
  for (const tab of tabs()) {
    const chosen = nameOf(tab) === name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(nameOf(tab)).hidden = !chosen;
  }
  opened[name]?.(rest, more);
}
