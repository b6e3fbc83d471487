// Training: start it, follow it live with its loss curve, and stop it. A training goes on without the page.

import { get, post } from "../lib/api.js";
import { epochs } from "../lib/charts.js";
import { $, button, el, head, say, trouble } from "../lib/dom.js";
import { duration, when } from "../lib/format.js";
import { isRunning, told as progressOf } from "../shell/figures.js";

const EVERY = 1000; // milliseconds between two looks at a running job
const SHOWN = 5; // trainings before
const WORDS = { queued: "waiting", running: "running", succeeded: "succeeded", failed: "failed", cancelled: "cancelled" };
const MEASURES = [
  { field: "loss", label: "Loss", ink: "--accent" },
  { field: "ndcg", label: "NDCG@10", ink: "--down", dash: [6, 3] }, // on held-out events
];
let following = null;
let show = null; // what draws the curve, once there is one
let shown = "";

// `trained()` is called when a training has ended.
export function begin(trained) {
  $("train").addEventListener("submit", () => start(trained).catch(trouble));
}

export async function refresh(trained) {
  const { jobs } = await get(`v1/jobs?limit=${SHOWN + 1}`);
  const [latest, ...before] = jobs;
  draw(latest);
  $("trainings").parentElement.hidden = !before.length;
  $("trainings").replaceChildren(...before.slice(0, SHOWN).map(past));
  if (isRunning(latest) && following !== latest.job_id) follow(latest.job_id, trained);
}

async function start(trained) {
  const form = new FormData($("train"));
  const options = Object.fromEntries([...form].filter(([, value]) => value !== ""));
  if (options.epochs) options.epochs = Number(options.epochs);
  const { job_id: id } = await post("v1/models/train", { options });
  say("The training has begun. It goes on if you close this page.");
  await follow(id, trained);
}

async function follow(id, trained) {
  following = id;
  try {
    for (;;) {
      const job = await get(`v1/jobs/${id}`);
      if (following !== id) return;
      draw(job);
      if (!isRunning(job)) break;
      await new Promise((resolve) => setTimeout(resolve, EVERY));
    }
    await trained();
  } catch (error) {
    trouble(error);
  } finally {
    following = null;
  }
}

function draw(job) {
  const running = isRunning(job);
  $("train-start").disabled = running;
  $("job").hidden = !job;
  if (!job) return;
  const { progress } = job;
  $("job-title").textContent = running ? "Training now" : "The last training";
  $("job-state").textContent = `${WORDS[job.state]}${job.error ? `: ${job.error}` : ""}`;
  $("job-state").className = job.error ? "errors" : "note";
  const bar = $("job-progress");
  bar.hidden = !running;
  if (running && progress?.steps) bar.value = progress.step / progress.steps;
  else bar.removeAttribute("value");
  $("job-note").textContent = told(job, running);
  curve(job.curve);
  $("job-actions").replaceChildren(...(running ? [button("Stop the training", () => cancel(job.job_id), { class: "danger" })] : []));
}

// The curve of a job, and its figures as a table. What has not changed is left alone: it may be being read.
function curve(points) {
  $("curve-part").hidden = points.length < 2; // one epoch is no curve
  const now = JSON.stringify(points);
  if (points.length < 2 || shown === now) return;
  shown = now;
  show ??= epochs($("curve"), MEASURES);
  const at = points.map(({ epoch }) => epoch);
  const figures = MEASURES.map(({ field }) => points.map((each) => (typeof each[field] === "number" ? each[field] : null)));
  show([at, ...figures], `${MEASURES.map(({ label }, place) => range(label, figures[place])).filter(Boolean).join(", ")}, epochs ${at[0]} to ${at.at(-1)}`);
  $("curve-figures").replaceChildren(
    el("thead", {}, el("tr", {}, head("Epoch"), MEASURES.map(({ label }) => head(label, true)))),
    el("tbody", {}, at.map((epoch, row) => el("tr", {}, el("th", { scope: "row" }, `${epoch}`), figures.map((column) => el("td", { class: "number" }, column[row]?.toPrecision(3) ?? "–"))))),
  );
}

function range(label, figures) {
  const known = figures.filter((figure) => figure !== null);
  return known.length ? `${label} from ${known[0].toPrecision(3)} to ${known.at(-1).toPrecision(3)}` : "";
}

function told(job, running) {
  if (running) return progressOf(job);
  const { started, finished, result } = job;
  const took = started && finished ? ` in ${duration((new Date(finished) - new Date(started)) / 1000)}` : "";
  return result?.version ? `Version ${result.version}${took && `, trained${took}`}. ${result.sentence ?? ""}` : `Nothing was published${took ? `, after${took.slice(3)}` : ""}.`;
}

const past = (job) =>
  el("li", {}, el("span", { class: "what" }, el("span", { class: "badge" }, WORDS[job.state]), " ", job.error ?? told(job, false)), when(job.created));

async function cancel(id) {
  try {
    await post(`v1/jobs/${id}/cancel`, {});
    say("The training stops within some seconds; what is served stays as it is.");
  } catch (error) {
    trouble(error);
  }
}
