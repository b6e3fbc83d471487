// Scenarios: the list of saved questions, and each of them.

import { after, get } from "../lib/api.js";
import { $, el, trouble } from "../lib/dom.js";
import { counted } from "../lib/format.js";
import { address, go, link, split } from "../shell/tabs.js";
import { showScenario } from "./scenario_page.js";

let begun = false;

export async function open(name) {
  if (!begun) begin();
  split("scenarios", name);
  const scenarios = await load().catch(trouble);
  if (name && scenarios) await showScenario(name, scenarios, () => open(address()[1])).catch(trouble);
}

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
    : "None yet. A scenario is a question that is saved under a name, with its filters and rules: name one.";
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
