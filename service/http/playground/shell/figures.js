// The served model's figures beside those of its rivals.

import { get } from "../lib/api.js";
import { share } from "../lib/bars.js";
import { $, el, trouble } from "../lib/dom.js";
import { number } from "../lib/format.js";

export const NAMES = { hr: "HR@10", ndcg: "NDCG@10" };
const RIVALS = 2; // rows beside the live figures

// Rows of {name, hr, ndcg}: the model first, then every rival that it was measured against, best first.
function rivals({ metrics, metadata }) {
  if (typeof metrics?.ndcg !== "number") return [];
  const popularity = { popularity: { hr: metrics.popularity_hr, ndcg: metrics.popularity_ndcg } };
  const baselines = Object.entries(metadata?.baselines ?? popularity).map(([name, row]) => ({ name, ...row }));
  return [{ ...metrics, name: "Heed" }, ...baselines.sort((one, other) => other.ndcg - one.ndcg)];
}

// A bar for each of the rows, of one metric.
export function bars(model, metric) {
  const rows = rivals(model).filter((row) => typeof row[metric] === "number");
  const most = Math.max(...rows.map((row) => row[metric]), 1e-9);
  return rows.map((row) => el("div", { class: "rival" }, el("span", {}, row.name), share(row[metric] / most, `${row.name}, ${NAMES[metric]}`, number(row[metric]))));
}

// The questions by which a model was judged: what comes next, and, where users take items again, what is new to them,
// which is what recommendations answer by default. Each can be given to `bars`.
export function questions({ metrics, metadata }) {
  const next = { metrics, metadata };
  const items = metadata?.new_items;
  if (!items) return [next];
  return [
    { ...next, title: metadata.next_basket ? "The next basket" : "The next item" },
    { metrics: items.metrics, metadata: items, title: "What is new to the user, as recommended by default" },
  ];
}

export async function refresh() {
  try {
    const [{ models }, ready] = await Promise.all([get("v1/models"), get("health/ready")]);
    const served = ready.checks?.model ?? "";
    const model = models.find(({ version }) => version === served);
    $("version").textContent = served;
    $("model-note").textContent = model ? `HR@10: ${model.metadata?.has_times === false ? "the held-out item" : model.metadata?.next_basket ? "an item of the next basket" : "the next item"} is among ten.` : "None is trained: answers come from content and popularity.";
    $("model-bars").replaceChildren(...(model ? bars(model, "hr").slice(0, RIVALS) : []));
  } catch (error) {
    trouble(error);
  }
}
