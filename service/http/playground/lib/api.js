// The public API.

import { given, refused } from "../shell/key.js";

let unanswered = 0; // questions

export class Problem extends Error {
  constructor(status, document, wait) {
    super(sentence(status, document, wait));
    this.status = status;
    this.errors = document.errors ?? []; // of a 422: [{pointer, detail}]
  }
}

// Past a bound the service refuses at once and says when to come back.
function sentence(status, document, wait) {
  const told = document.detail ?? `The service answered ${status}.`;
  if (status !== 429 && status !== 503) return told;
  return `The service is busy: ${told} Try again${wait ? ` in ${wait} s` : ""}.`;
}

export async function ask(method, path, body, { signal } = {}) {
  busy(1);
  try {
    return await answer(method, path, body, signal);
  } finally {
    busy(-1);
  }
}

// Whether the page shows everything yet, for assistive technology and whatever else reads the page.
function busy(change) {
  unanswered += change;
  document.querySelector("main").setAttribute("aria-busy", unanswered > 0);
}

async function answer(method, path, body, signal) {
  const headers = { ...given(), ...(method === "GET" ? {} : { "content-type": "application/json" }) };
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal }).catch(unreachable);
  const text = await response.text();
  if (response.ok) return text ? JSON.parse(text) : {};
  refused(response.status);
  throw new Problem(response.status, problem(response, text), response.headers.get("retry-after"));
}

function unreachable(error) {
  throw error.name === "AbortError" ? error : new Error("The service cannot be reached. Is it running?");
}

// What stands between may answer with something else than a problem document.
const problem = (response, text) => (/\bjson\b/.test(response.headers.get("content-type") ?? "") ? JSON.parse(text) : {});

export const post = (path, body, more) => ask("POST", path, body, more);
export const get = (path, more) => ask("GET", path, undefined, more);

export const after = (cursor) => (cursor ? `&cursor=${encodeURIComponent(cursor)}` : "");
export const userPath = (id) => `v1/users/${encodeURIComponent(id)}`;
export const itemPath = (id) => `v1/items/${encodeURIComponent(id)}`;

// The answers of a list of batched questions, in their order; null for each that failed.
export async function batch(requests) {
  if (!requests.length) return [];
  const { responses } = await post("v1/batch", { requests });
  return responses.map(({ status, body }) => (status < 400 ? body : null));
}
