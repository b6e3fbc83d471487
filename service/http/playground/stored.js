// How much is stored, and what to do next while that is nothing.

import { given } from "./key.js";
import { $ } from "./dom.js";

const COUNTED = ["items", "events", "users"];

export async function refresh() {
  const counts = await counted();
  for (const name of COUNTED) $(`stored-${name}`).textContent = counts[name]?.toLocaleString("en") ?? "–";
  $("empty").hidden = counts.items !== 0 || counts.events !== 0;
  for (const place of document.querySelectorAll(".origin")) place.textContent = new URL(".", location).href.replace(/\/$/, "");
}

// From the gauges of /metrics, which a guard may keep to itself: then nothing is known.
async function counted() {
  const answer = await fetch("metrics", { headers: given() }).catch(() => null);
  const text = answer?.ok ? await answer.text() : "";
  const gauge = (name) => new RegExp(`^heed_${name}(?:\\{[^}]*\\})? (\\S+)$`, "m").exec(text)?.[1];
  return Object.fromEntries(COUNTED.filter(gauge).map((name) => [name, Number(gauge(name))]));
}
