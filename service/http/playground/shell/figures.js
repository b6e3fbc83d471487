// The served model's figures beside those of its rivals.

import { get } from "../lib/api.js";
import { share } from "../lib/bars.js";
import { $, el, trouble } from "../lib/dom.js";
import { duration, number } from "../lib/format.js";
import { changed } from "../explore/session.js";
import { given } from "./key.js";

export const NAMES = { hr: "HR@10", ndcg: "NDCG@10" };
const OFTEN = 3000; // milliseconds between two looks at a running training
const SELDOM = 15_000; // and for one that begins elsewhere

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
    { ...next, title: metadata.has_times === false ? "The held-out item" : metadata.next_basket ? "The next basket" : "The next item" },
    { metrics: items.metrics, metadata: items, title: "What is new to the user, as recommended by default" },
  ];
}

export async function refresh() {
  try {
    const [{ models }, ready] = await Promise.all([get("v1/models"), get("health/ready")]);
    const served = ready.checks?.model ?? "";
    const model = models.find(({ version }) => version === served);
    $("version").textContent = served;
    const { sentence, verdict } = model?.metadata ?? {};
    const told = verdict?.is_served === false ? "It was activated although it was no better when it was trained." : (sentence ?? "").replace(/: NDCG@10 .*?\); .*?\.( |$)/, ".$1"); // its figures are in Models
    $("model-note").textContent = model ? told : "None is trained: answers come from content and popularity.";
  } catch (error) {
    trouble(error);
  }
}

export const isRunning = (job) => job?.state === "queued" || job?.state === "running";

// How far a training is, and the time that is left of its stage.
export function told({ progress }) {
  if (!progress) return "it is being started";
  const epoch = progress.epoch ? `, epoch ${progress.epoch} of at most ${progress.epochs}` : "";
  return `${progress.stage}${epoch}${progress.eta_s ? `, about ${duration(progress.eta_s)} left in this stage` : ""}`;
}

// Follows a training on every tab; at its end everything is asked for again. Not every key may see it.
export async function follow(wasRunning = false) {
  if (document.visibilityState === "visible") {
    const answer = await fetch("v1/jobs?limit=1", { headers: given() }).catch(() => null);
    if (answer?.status === 401 || answer?.status === 403) return;
    const [job] = answer?.ok ? (await answer.json()).jobs : [];
    const runs = isRunning(job);
    $("training-note").hidden = !runs;
    if (runs) $("training-note").textContent = `Training now: ${told(job)}.`;
    if (wasRunning && answer?.ok && !runs) await Promise.all([refresh(), changed()]).catch(trouble);
    if (answer?.ok) wasRunning = runs;
  }
  setTimeout(() => follow(wasRunning), wasRunning ? OFTEN : SELDOM);
}
