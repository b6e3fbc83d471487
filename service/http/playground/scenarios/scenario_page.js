// One scenario: its question as JSON, its versions, and its answer beside another one's.

import { ask, get } from "../lib/api.js";
import { confirmed } from "../lib/dialogs.js";
import { $, button, el, say, trouble } from "../lib/dom.js";
import { when } from "../lib/format.js";
import { jsonEditor } from "../lib/json_editor.js";
import { go } from "../shell/tabs.js";
import { preview } from "./preview.js";

export const TEMPLATES = [
  { name: "home", title: "Home page", about: "Rows for one person, each with its reason", scenario: { question: "rows", rows: 6, limit: 10 } },
  { name: "for-you", title: "For you", about: "One list for one person, with some variety", scenario: { question: "recommend", limit: 10, diversity: 0.2, filter: {}, rules: [] } },
  { name: "bestsellers", title: "Bestsellers", about: "What most people take", scenario: { question: "popular", by: "popular", limit: 10 } },
  { name: "new", title: "New arrivals", about: "The newest items first", scenario: { question: "popular", by: "newest", limit: 10 } },
  { name: "similar", title: "Similar items", about: "What is like the item that is looked at", scenario: { question: "similar", limit: 10 } },
  { name: "together", title: "Bought together", about: "What people take with an item", scenario: { question: "together", relation: "basket", limit: 10 } },
  { name: "search", title: "Search box", about: "Results, with counts of categories", scenario: { question: "search", limit: 20, facets: [{ field: "categories", limit: 20 }] } },
];
let current = "";

// `from` names the template of a scenario that is new; `changed()` is called when a version was put or the scenario was deleted.
export async function showScenario(name, scenarios, from, changed) {
  current = name;
  const path = `v1/scenarios/${encodeURIComponent(name)}`;
  const stored = scenarios.find((each) => each.name === name);
  const versions = stored ? (await get(`${path}/versions?limit=50`)).versions : [];
  if (name !== current) return;
  const put = async (body) => {
    const { version } = await ask("PUT", path, body);
    await changed();
    say(`Saved as version ${version}; it is in use at once.`);
  };
  const drop = async () => {
    if (!(await confirmed(`Delete ${name}?`, "Requests for it are refused from now on. Its versions stay, and one of them can be put back.", "Delete it"))) return;
    try {
      await ask("DELETE", path);
      say(`${name} is deleted.`);
      go("scenarios");
    } catch (error) {
      trouble(error);
    }
  };
  const begun = TEMPLATES.find((each) => each.name === from) ?? TEMPLATES[1];
  const editor = jsonEditor({ label: "Question as JSON", value: stored?.scenario ?? begun.scenario, save: put, word: stored ? "Save as a new version" : "Create", rows: 16 });
  const area = editor.querySelector("textarea");
  const draft = () => JSON.parse(area.value);
  const about = el("p", { class: "note" }, `${begun.about}.`);
  const choose = ({ target }) => {
    const chosen = TEMPLATES[target.value];
    area.value = JSON.stringify(chosen.scenario, null, 2);
    about.textContent = `${chosen.about}.`;
  };
  const templates = el("select", { id: "template", onchange: choose }, TEMPLATES.map((each, at) => el("option", { value: at, selected: each === begun }, each.title)));
  $("scenarios-one").replaceChildren(
    el("p", { class: "back" }, el("a", { href: "#/scenarios" }, "All scenarios")),
    el("h2", {}, name, el("span", { class: "badge" }, stored ? `version ${stored.version}` : "new")),
    ...(stored ? [] : [el("label", { for: "template" }, "Template"), templates, about]),
    el("p", { class: "note" }, "Each field below is a default, which a request may narrow."),
    editor,
    ...(stored ? [el("div", { class: "actions" }, button("Delete this scenario", drop, { class: "danger" }))] : []),
    ...(versions.length > 1 ? [history(versions, put)] : []),
    preview(name, scenarios, versions, draft),
  );
}

const history = (versions, put) =>
  el(
    "details",
    {},
    el("summary", {}, "Versions before"),
    el(
      "ol",
      { class: "timeline" },
      versions.slice(1).map(({ version, written_at: at, scenario }) =>
        el(
          "li",
          {},
          el("span", { class: "what" }, `version ${version}: `, scenario ? el("code", {}, JSON.stringify(scenario)) : "deleted"),
          when(at),
          scenario ? button("Put back", () => put(scenario).catch(trouble), { "aria-label": `Put version ${version} back` }) : null,
        ),
      ),
    ),
  );
