// The public API, and how long its answers took.

import { given, refused } from "./key.js";

export const timings = []; // the latest first: {path, total, stages: {name: milliseconds}}
const KEPT = 12;
const watchers = [];

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail ?? `The service answered ${status}.`);
    this.status = status;
  }
}

export function onTiming(watch) {
  watchers.push(watch);
}

export async function ask(method, path, body, { signal } = {}) {
  const headers = { ...given(), ...(method === "GET" ? {} : { "content-type": "application/json" }) };
  const begun = performance.now();
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
  const text = await answer.text();
  remember(`${method} /${path}`, performance.now() - begun, answer.headers.get("server-timing"));
  if (answer.ok) return text ? JSON.parse(text) : {};
  refused(answer.status);
  throw new Problem(answer.status, problem(answer, text));
}

// What stands between may answer with something else than a problem document.
const problem = (answer, text) => (/\bjson\b/.test(answer.headers.get("content-type") ?? "") ? JSON.parse(text) : {});

export const post = (path, body, more) => ask("POST", path, body, more);
export const get = (path, more) => ask("GET", path, undefined, more);

function remember(path, total, header) {
  const stages = {};
  for (const part of (header ?? "").split(",")) {
    const found = /^\s*([\w-]+);dur=([\d.]+)/.exec(part);
    if (found) stages[found[1]] = Number(found[2]);
  }
  timings.unshift({ path, total, stages });
  timings.length = Math.min(timings.length, KEPT);
  for (const watch of watchers) watch();
}
