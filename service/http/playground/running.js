// What is served, and how fast: the model versions, and the stages of the last requests.

import { get, onTiming, post, timings } from "./api.js";
import { $, el, number, trouble } from "./dom.js";

export function begin({ changed }) {
  onTiming(latency);
  models(changed);
  return () => models(changed);
}

const head = (text, numeric) => el("th", { scope: "col", class: numeric ? "number" : null }, text);

async function models(changed) {
  try {
    const [{ models: versions }, ready] = await Promise.all([get("v1/models"), get("health/ready")]);
    const served = ready.checks?.model ?? "";
    $("version").textContent = served;
    const rows = versions.map((version) => row(version, served, changed));
    const empty = el("tr", {}, el("td", { colspan: 5 }, "None is trained yet: answers come from content and popularity."));
    $("models").replaceChildren(
      el("thead", {}, el("tr", {}, head("version"), head("HR@10", true), head("NDCG@10", true), head("made"), head("serve"))),
      el("tbody", {}, ...(rows.length ? rows : [empty])),
    );
  } catch (error) {
    trouble(error);
  }
}

function row(version, served, changed) {
  const metrics = version.metrics ?? {};
  const metric = (name) =>
    el("td", { class: "number" }, typeof metrics[name] === "number" ? number(metrics[name]) : "", beside(metrics[`popularity_${name}`]));
  const now = version.version === served;
  const button = el(
    "button",
    { type: "button", disabled: now ? "" : null, onclick: () => activate(version.version, changed) },
    now ? "served" : "serve this",
  );
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, version.version),
    metric("hr"),
    metric("ndcg"),
    el("td", {}, (version.created ?? "").slice(0, 16).replace("T", " ")),
    el("td", {}, version.broken ? "broken" : button),
  );
}

// What popularity alone reached on the same events.
const beside = (value) => (typeof value === "number" ? el("span", { class: "beside" }, `popularity ${number(value)}`) : null);

async function activate(version, changed) {
  try {
    await post(`v1/models/${encodeURIComponent(version)}/activate`);
    await models(changed);
    changed();
  } catch (error) {
    trouble(error);
  }
}

function latency() {
  $("latency").replaceChildren(
    el("thead", {}, el("tr", {}, head("request"), head("ms here", true), head("ms in the service"))),
    el(
      "tbody",
      {},
      ...timings.map(({ path, total, stages }) =>
        el(
          "tr",
          {},
          el("th", { scope: "row" }, path),
          el("td", { class: "number" }, number(total, 1)),
          el("td", {}, Object.entries(stages).map(([name, ms]) => `${name} ${number(ms, 1)}`).join(", ")),
        ),
      ),
    ),
  );
}
