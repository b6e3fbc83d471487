// Live figures from /metrics: what is stored and how fast it grows, requests, latency, refusals and errors.

import { sparkline } from "../lib/charts.js";
import { $, debounced } from "../lib/dom.js";
import { count, counted, milliseconds, number } from "../lib/format.js";
import { between, quantile, reading } from "../lib/prometheus.js";
import { given } from "./key.js";
import { outcomes } from "./requests.js";

const EVERY = 3000; // milliseconds between two readings
const AT_FIRST = 700; // so that there is something to draw
const FEW = 6; // readings
const KEPT = 120; // readings: six minutes
const NAME = "heed-readings";
const readings = (JSON.parse(sessionStorage.getItem(NAME)) ?? []).filter((one) => Date.now() - 1000 * one.at < KEPT * EVERY);
const lines = Object.fromEntries(["growth", "traffic", "waiting", "failures"].map((name) => [name, sparkline($(`${name}-line`))]));
let opened; // requests by route when the page was opened, or the service restarted
let busy = false;
let refused = false;

export function begin() {
  for (const place of document.querySelectorAll(".origin")) place.textContent = new URL(".", location).href.replace(/\/$/, "");
  const wide = matchMedia("(min-width: 60rem)"); // on a phone one opens what one wants to see
  const fold = () => document.querySelectorAll("details.fold").forEach((each) => (each.open = wide.matches));
  wide.addEventListener("change", fold);
  fold();
  follow();
}

async function follow() {
  if (document.visibilityState === "visible") await refresh();
  setTimeout(follow, readings.length < FEW ? AT_FIRST : EVERY);
}

export const soon = debounced(() => refresh(), 100);

// Not every key may read /metrics: then nothing is known, nor asked for again before the page is reloaded.
async function refresh() {
  if (busy || refused) return;
  busy = true;
  try {
    const answer = await fetch("metrics", { headers: given() }).catch(() => null);
    refused ||= answer?.status === 401 || answer?.status === 403;
    if (!answer?.ok) return;
    const { routes, ...now } = reading(await answer.text());
    if (!(opened?.all[0] <= now.requests)) opened = routes;
    readings.push(now);
    readings.splice(0, readings.length - KEPT);
    sessionStorage.setItem(NAME, JSON.stringify(readings));
    draw(routes);
  } finally {
    busy = false;
  }
}

function draw(routes) {
  const now = readings.at(-1);
  const first = readings[0];
  const steps = readings.slice(1).map((one, at) => between(readings[at], one));
  const since = between(null, now);
  const recent = between(first, now);
  const lately = recent.requests && recent.seconds ? recent : since;
  const span = lately === since ? "since the start" : "in the last minutes";

  for (const name of ["items", "events", "users"]) $(`stored-${name}`).textContent = count(now[name]);
  $("empty").hidden = now.items !== 0 || now.events !== 0;
  const counts = readings.filter((one) => one.events !== null); // there is none while the database is away
  const [oldest, newest] = counts.length ? [counts[0], counts.at(-1)] : [now, now];
  const grown = newest.events - oldest.events;
  const minutes = (newest.at - oldest.at) / 60;
  const growth = grown > 0 ? `+${counted(grown, "event")} here, ${number(grown / Math.max(minutes, EVERY / 60000), 1)} a minute` : "no new events in the last minutes";
  tell("growth", growth, counts.map((one) => [one.at, one.events]), "Events stored over the last minutes", oldest.events ?? 0);

  const { rate } = between(readings.at(-6) ?? first, now);
  $("rate").textContent = rate === null ? count(since.requests) : `${number(rate, 1)}/s`;
  tell("traffic", `${counted(since.requests, "request")} since the start`, steps.map((one) => [one.at, one.rate ?? 0]), "Requests a second over the last minutes");

  const middle = quantile(lately.bounds, 0.5);
  const slow = quantile(lately.bounds, 0.95);
  $("median").textContent = milliseconds(middle);
  const waits = steps.filter((one) => one.requests).map((one) => [one.at, quantile(one.bounds, 0.5)]);
  tell("waiting", Number.isFinite(slow) ? `19 of 20 within ${milliseconds(slow)} ${span}` : "no request yet", waits, "Median latency over the last minutes");

  tell("failures", outcomes(routes, opened), steps.map((one) => [one.at, one.failed]), "Refused and failed requests over the last minutes");
  $("pulse-line").textContent = `${count(now.items)} items · ${count(now.events)} events · ${milliseconds(middle)} · ${$("refused").textContent} refused`.replace(" %", "\u00a0%");
}

// A note, and beside it the line through points of a time and a value.
function tell(name, text, points, label, low = 0) {
  $(`${name}-note`).textContent = text;
  lines[name](points.map(([at]) => at), points.map(([, value]) => value), `${label}: ${text}`, low);
}
