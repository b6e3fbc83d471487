// One scenario: its question as JSON, its versions, and its answer beside another one's.

import { ask, get } from "../lib/api.js";
import { confirmed } from "../lib/dialogs.js";
import { $, button, el, say, trouble } from "../lib/dom.js";
import { when } from "../lib/format.js";
import { jsonEditor } from "../lib/json_editor.js";
import { go } from "../shell/tabs.js";
import { preview } from "./preview.js";

const FIRST = { question: "recommend", limit: 10, filter: {}, rules: [] };
let current = "";

// `changed()` is called when a version was put or the scenario was deleted.
export async function showScenario(name, scenarios, changed) {
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
  const editor = jsonEditor({ label: "Question as JSON", value: stored?.scenario ?? FIRST, save: put, word: stored ? "Save as a new version" : "Create", rows: 16 });
  const draft = () => JSON.parse(editor.querySelector("textarea").value);
  $("scenarios-one").replaceChildren(
    el("p", { class: "back" }, el("a", { href: "#/scenarios" }, "All scenarios")),
    el("h2", {}, name, el("span", { class: "badge" }, stored ? `version ${stored.version}` : "new")),
    el("p", { class: "note" }, "question is recommend, search, similar, popular, together or rows; its fields are defaults, which a request may narrow."),
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
