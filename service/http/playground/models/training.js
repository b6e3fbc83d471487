// Training: start it, follow it live with its loss curve, and stop it. A training goes on without the page.

import { get, post } from "../lib/api.js";
import { lineChart } from "../lib/charts.js";
import { $, button, el, say, trouble } from "../lib/dom.js";
import { duration, number, when } from "../lib/format.js";

const EVERY = 1000; // milliseconds between two looks at a running job
const SHOWN = 5; // trainings before
const WORDS = { queued: "waiting", running: "running", succeeded: "succeeded", failed: "failed", cancelled: "cancelled" };
let following = null;

// `trained()` is called when a training has ended.
export function begin(trained) {
  $("train").addEventListener("submit", (event) => {
    event.preventDefault();
    start(trained).catch(trouble);
  });
}

export async function refresh(trained) {
  const { jobs } = await get(`v1/jobs?limit=${SHOWN + 1}`);
  const [latest, ...before] = jobs;
  draw(latest);
  $("trainings").replaceChildren(...before.slice(0, SHOWN).map(past));
  if (latest && isRunning(latest) && following !== latest.job_id) follow(latest.job_id, trained);
}

const isRunning = ({ state }) => state === "queued" || state === "running";

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
  const running = Boolean(job) && isRunning(job);
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
  const points = (field) => job.curve.filter((each) => typeof each[field] === "number").map((each) => [each.epoch, each[field]]);
  $("loss").replaceChildren(...chart("Loss", points("loss")));
  $("validation").replaceChildren(...chart("NDCG@10 on held-out events", points("ndcg")));
  $("job-actions").replaceChildren(...(running ? [button("Stop the training", () => cancel(job.job_id), { class: "danger" })] : []));
}

const chart = (name, points) => (points.length > 1 ? [el("h4", {}, name), lineChart(points, name, "epoch")] : []);

function told(job, running) {
  const { progress, metrics, started, finished, result } = job;
  if (running && progress) {
    const epoch = progress.epoch ? `, epoch ${progress.epoch} of at most ${progress.epochs}` : "";
    const left = progress.eta_s ? `, about ${duration(progress.eta_s)} left` : "";
    return `${progress.stage}${epoch}${left}`;
  }
  if (running) return "It is being started.";
  const took = started && finished ? ` in ${duration((new Date(finished) - new Date(started)) / 1000)}` : "";
  const reached = typeof metrics?.ndcg === "number" ? `, NDCG@10 ${number(metrics.ndcg)}` : "";
  return result?.version ? `Version ${result.version}${took}${reached}.` : `Nothing was published${took ? `, after${took.slice(3)}` : ""}.`;
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
