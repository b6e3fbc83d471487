// Scenarios: the list of saved questions, and each of them.

import { after, get } from "../lib/api.js";
import { $, el, trouble } from "../lib/dom.js";
import { counted } from "../lib/format.js";
import { address, go, link, split } from "../shell/tabs.js";
import { TEMPLATES, showScenario } from "./scenario_page.js";

let begun = false;

export async function open(name, more) {
  if (!begun) begin();
  split("scenarios", name, el("h2", {}, "Begin with a template"), el("p", { class: "note" }, "A scenario is a question that is saved under a name. An application asks it by the name; what it answers is changed here."), el("ul", { class: "list" }, TEMPLATES.map(template)));
  const scenarios = await load().catch(trouble);
  if (name && scenarios) await showScenario(name, scenarios, more.get("from"), () => open(...address().slice(1))).catch(trouble);
}

const template = ({ name, title, about }) =>
  el("li", {}, el("a", { href: `${link("scenarios", name)}?from=${name}` }, el("span", { class: "who" }, title), el("span", { class: "beside" }, about)));

function begin() {
  begun = true;
  $("new-scenario").addEventListener("submit", () => {
    if ($("scenario-name").value.trim()) go("scenarios", $("scenario-name").value.trim());
  });
}

async function load() {
  const scenarios = [];
  for (let cursor = ""; cursor !== null; ) {
    const page = await get(`v1/scenarios?limit=1000${after(cursor)}`);
    scenarios.push(...page.scenarios);
    ({ cursor } = page);
  }
  $("scenarios-note").textContent = scenarios.length
    ? `${counted(scenarios.length, "scenario")}.`
    : "None yet: name one, or begin with a template.";
  $("scenarios-list").replaceChildren(...scenarios.map(row));
  return scenarios;
}

const row = ({ name, version, scenario }) =>
  el(
    "li",
    {},
    el(
      "a",
      { href: link("scenarios", name), "aria-current": address()[1] === name ? "true" : null },
      el("span", { class: "who" }, name, el("span", { class: "badge" }, scenario.question)),
      el("span", { class: "beside" }, `version ${version}${scenario.fallback ? `, falls back to ${scenario.fallback}` : ""}`),
    ),
  );
