// Numbers, shares and times as people read them.

import { el } from "./dom.js";

export function number(value, digits = 3) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const count = (value) => (value ?? null) === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: 0 });

// A bound of a range: a year or a price in full, only large numbers in short.
export const bound = (value) =>
  value.toLocaleString("en", Math.abs(value) < 1e5 ? { maximumFractionDigits: 2, useGrouping: "min2" } : { notation: "compact", maximumSignificantDigits: 3 });

export const counted = (value, noun, many = "s") => `${count(value)} ${noun}${value === 1 ? "" : many}`;

export function percent(value) {
  return value > 0 && value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

export function milliseconds(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const value = 1000 * seconds;
  return `${value < 10 ? value.toFixed(1) : value.toFixed(0)} ms`;
}

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let at = 0;
  for (; bytes >= 1000 && at < units.length - 1; at += 1) bytes /= 1000;
  return `${at ? bytes.toFixed(1) : bytes} ${units[at]}`;
}

export function when(timestamp, digits = 16) {
  const shown = new Date(timestamp).toISOString().slice(0, digits).replace("T", " ");
  return el("time", { datetime: timestamp, title: timestamp }, shown);
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// Words as a sentence of its own.
export const asSentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;

// Words as an enumeration: "a", "a and b", "a, b and c".
export function listed(words) {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

// A person as a circle: its colour and letters differ from one id to the next.
export function avatar(id) {
  const letters = [...id];
  const hash = letters.reduce((sum, letter) => (31 * sum + letter.codePointAt(0)) % 65521, 7);
  const made = el("span", { class: "avatar", "aria-hidden": "true" }, letters.length < 4 ? id : `${letters[0]}${letters.at(-1)}`.toUpperCase());
  made.style.background = `hsl(${(137 * hash) % 360} 45% 32%)`;
  return made;
}

// Parts of a text, those that match marked.
export function marked(parts, otherwise) {
  if (!parts) return [otherwise];
  return parts.map((part) => (part.match ? el("mark", {}, part.text) : part.text));
}
