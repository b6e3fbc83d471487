// An answer as a picture: the query at the left, the person's events along time with the weight that each head gives them, and
// the sum of the values at the right, as a part of the score. Sizes are in CSS pixels; the picture is as wide as its place.

import { $, el, head, svg } from "../lib/dom.js";
import { count, counted, listed, number, percent } from "../lib/format.js";
import { name } from "../lib/titles.js";
import { bins } from "./memory.js";
import { done, partName } from "./reasons.js";

const WIDE = 760; // from here on the query and the score stand beside the events
const CURVES = 44; // width of the lines from the query to the heads, and from these to the score
const LEAST = 2.5; // width of a cell: where it would be less, events share a cell
const ROW = 18; // height of a name
const BARS = 54; // height of the largest bar
const STRIP = 24; // height of a strip
const PITCH = 54; // from one strip to the next
const LETTERS = 34; // of a title that is cut off
const NAMED = { wide: 6, narrow: 4 };
const TABLE = 50; // events in the table
const DAY = 86_400_000; // milliseconds
const ruler = document.createElement("canvas").getContext("2d");
let shown; // the last answer that was drawn

// `asked` is {title, words, user, keys, hard, trials}: what asks, for whom, how many keys FAISS was to retrieve (undefined: every
// event), and how many events of the score are not stored, and so not in the picture. `found` is the score; words have none.
export function draw(asked, cells, map, found) {
  shown = { cells, map, isCoarse: map.retrieval === "coarse" };
  const interests = cells.filter((one) => !one.timestamp).length;
  const events = cells.length - interests;
  $("asked-title").textContent = asked.title;
  $("asked-for").textContent = `asked for ${asked.user}`;
  $("seen-title").textContent = `${interests ? `${counted(interests, "interest")}, and ` : ""}${counted(events, "event")}${events > 1 ? ", from the oldest to the newest" : ""}`;
  $("picture-caption").textContent = caption(asked).replaceAll(" %", "\u00a0%");
  $("picture").dataset.retrieval = map.retrieval;
  $("seen").hidden = $("readout").hidden = $("picture-table").hidden = !map.rows.length;
  sum(found);
  table();
  drawEvents();
}

export function begin() {
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.abs(contentRect.width - width) > 1) drawEvents();
    width = contentRect.width;
  }).observe($("picture"));
  $("event").addEventListener("input", () => select(Number($("event").value)));
  const point = (event) => select(Math.floor((event.offsetX - shown.left) / shown.step));
  for (const kind of ["pointermove", "pointerdown"]) $("events").addEventListener(kind, point);
}

function caption({ keys, words, hard, trials }) {
  const { cells, map, isCoarse } = shown;
  if (!map.rows.length) return `No stored event can be attended to${words ? "" : ": the score has only its other parts"}.`;
  const best = strongest(cells, 2).map((one) => `“${one.title()}” (${percent(one.mean)})`);
  const heads = map.weights.length;
  const total = (weights) => weights.reduce((all, one) => all + one, 0) / heads;
  const each = heads === 1 ? "One head of the model looks" : `Each of the ${heads} heads of the model looks`;
  const told = [`${each} back over all ${count(cells.length)} events and shares its attention out among them; the fuller the colour, the larger the share.`];
  if (cells.length === 1) told[0] = `${each} at the one event that there is.`;
  else if (hard) told[0] = `${each} only at the one event that fits it best.`;
  else if (isCoarse)
    told[0] = `${each} only at the ${Math.min(keys, cells.length)} events that FAISS found for it, ${cells.filter((one) => one.mean).length} different ones in all, which hold ${percent(total(map.mass))} of the attention that all ${count(cells.length)} would get.`;
  told.push(`The largest share${best.length > 1 ? "s go" : " goes"} to ${listed(best)}.`);
  const held = total(map.weights.flat());
  if (held < 0.999) told.push(`The ${count(map.rows.length)} of most weight are drawn, which hold ${percent(held)}.`);
  if (keys && !isCoarse) told.push(`FAISS was asked for ${keys} keys; this answer attended every event.`);
  if (trials) told.push(`${counted(trials, "trial")} ${trials === 1 ? "is" : "are"} not stored, and not in the picture.`);
  return told.join(" ");
}

// The cells, or bins, of most weight.
const strongest = (all, most) => all.filter((one) => one.mean > 0).sort((one, other) => other.mean - one.mean).slice(0, most);

// ---------------------------------------------------------------------------- events along time

const rect = (x, y, width, height, kind, more) => svg("rect", { x, y, width, height, class: kind, ...more });
const text = (x, y, kind, anchor, ...words) => svg("text", { x, y, class: kind, "text-anchor": anchor }, ...words);
const curve = (x, y, to, end) => svg("path", { d: `M${x} ${y}C${(x + to) / 2} ${y} ${(x + to) / 2} ${end} ${to} ${end}`, class: "flow" });
const written = (timestamp) => new Date(timestamp).toISOString().slice(0, 16).replace("T", " ");

// The root of a share: a head that looks at many events alike is seen too, beside one that looks at few.
const ink = (weight, most) => ({ "fill-opacity": Math.max(0.05, Math.sqrt(weight / most)).toFixed(3) });

function drawEvents() {
  const place = $("events");
  const room = $("picture").clientWidth;
  const isWide = room >= WIDE && shown?.map.rows.length > 0;
  $("picture").classList.toggle("wide", isWide);
  if (!shown?.map.rows.length || !room) return;
  const { cells, map } = shown;
  const left = isWide ? CURVES : 0;
  const width = place.parentElement.clientWidth - 2 * left;
  const drawn = bins(cells, Math.floor(width / LEAST));
  const step = width / drawn.length;
  const x = (at) => left + at * step;
  ruler.font = `600 12px ${getComputedStyle(place).fontFamily}`;
  const names = titles(drawn, isWide ? NAMED.wide : NAMED.narrow, step, width);
  const base = Math.max(...names.map((one) => one.row + 1)) * ROW + BARS + 8; // foot of the bars
  const height = base + 42 + PITCH * map.weights.length;
  const middle = (height - (place.getBoundingClientRect().top - place.parentElement.getBoundingClientRect().top)) / 2; // of the boxes beside it
  const largest = Math.max(...drawn.map((one) => one.mean));
  const tall = (one) => (BARS * one.mean) / largest;
  const most = Math.max(...drawn.flatMap((one) => one.weights));
  Object.assign(shown, { drawn, step, left, x, width, most, middle, box: step > 5 ? step - 1 : step });
  const pattern = svg("pattern", { id: "hatching", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { y2: 5 }));
  place.replaceChildren(
    svg("defs", {}, pattern),
    ...names.map((one) => svg("line", { x1: left + one.x, x2: left + one.x, y1: one.row * ROW + (one.isBeside ? 2 : 16), y2: base - tall(drawn[one.at]), class: "leader" })),
    ...drawn.map((one, at) => rect(x(at) + Math.max(0, shown.box - 28) / 2, base - tall(one), Math.min(shown.box, 28), tall(one), "mean")),
    ...drawn.map((one, at) => svg("circle", { cx: x(at) + step / 2, cy: base + 7, r: Math.min(2.6, step * 0.4), class: one.mean ? "event" : "event unseen" })),
    ...map.weights.flatMap((_, h) => strip(h, base + 54 + PITCH * h)),
    rect(0, base - BARS, Math.max(step, 3), height - base + BARS - 2, "here"),
    ...names.map(({ at, row, from, end }) => text(left + (end ?? from), row * ROW + 12, "name", end ? "end" : "start", label(drawn[at].best), svg("tspan", { class: "share" }, ` ${percent(drawn[at].best.mean)}`))),
    ...dates(base + 26),
    ...map.weights.flatMap((_, h) => heading(h, base + 49 + PITCH * h)),
  );
  place.setAttribute("viewBox", `0 0 ${width + 2 * left} ${height}`);
  place.setAttribute("height", height);
  place.setAttribute("aria-label", `${$("picture-caption").textContent} The table below has the same figures.`);
  legend();
  $("event").max = drawn.length - 1;
  $("event").style.margin = `0 ${left}px`;
  $("event").style.width = `${width}px`;
  select(drawn.findIndex((one) => one.some.includes(strongest(cells, 1)[0])));
}

// One head: a cell for each event, a mark under each event that FAISS retrieved, lines from the query and to the sum, and its
// mass, as a glass that is filled so far.
function strip(h, y) {
  const { drawn, map, isCoarse, left, x, width, step, most, middle, box } = shown;
  const parts = [rect(left, y, width, STRIP, "strip")];
  const mark = Math.min(3, step / 2 - 0.25); // half its width: neighbours do not touch
  if (left) {
    const [from, to, own, full] = [left + width, 2 * left + width - 8, y + STRIP / 2, STRIP * Math.min(1, map.mass[h])];
    parts.push(curve(0, middle, left - 6, own), curve(from + 16, own, to, middle), svg("path", { d: `M${to} ${middle - 5}l8 5l-8 5z`, class: "arrow" }));
    parts.push(rect(from + 5, y, 7, STRIP, "glass"), rect(from + 5, y + STRIP - full, 7, full, "mean"));
  }
  drawn.forEach(({ weights }, at) => {
    parts.push(weights[h] > 0 ? rect(x(at), y, box, STRIP, "cell", ink(weights[h], most)) : rect(x(at), y, box, STRIP, "unseen"));
    if (isCoarse && weights[h] > 0) parts.push(svg("path", { d: `M${x(at) + step / 2} ${y + 2 + STRIP}l${mark} 6h${-2 * mark}z`, class: "retrieved" }));
  });
  return parts;
}

function heading(h, y) {
  const { cells, map, isCoarse, left, width } = shown;
  const weights = cells.map((one) => one.weights[h]).filter((weight) => weight > 0);
  const told = isCoarse ? `${weights.length} retrieved hold ${percent(map.mass[h])} of the attention` : `at most ${percent(Math.max(0, ...weights))} on one event`;
  return [text(left, y, "head", "start", `Head ${h + 1}`), text(left + width, y, "mass", "end", told)];
}

const label = (one) => (one.title().length > LETTERS ? `${one.title().slice(0, LETTERS - 1).trimEnd()}…` : one.title());

// Places of the names of the strongest events: in rows from the top, if possible none over another or over another's line.
function titles(drawn, most, step, width) {
  const best = strongest(drawn, most).map((one) => drawn.indexOf(one)).sort((one, other) => one - other);
  const isRight = (at) => at > drawn.length / 2;
  const placed = [];
  for (const at of [...best.filter(isRight).reverse(), ...best.filter((at) => !isRight(at))]) {
    const x = (at + 0.5) * step;
    const long = ruler.measureText(`${label(drawn[at].best)} ${percent(drawn[at].best.mean)}`).width;
    const sides = [x - long - 5, x + 5].filter((from) => from >= 0 && from + long <= width); // of its line
    if (!isRight(at)) sides.reverse();
    const covers = (sides.length ? sides : [0]).map((from) => ({ from, end: from && from < x ? x - 5 : undefined, low: from - 3, high: from + long + 4 }));
    const isFree = ({ low, high }, row) =>
      placed.every((one) => {
        if (one.row === row) return one.high < low || one.low > high;
        return one.row < row ? one.x < low || one.x > high : x < one.low || x > one.high; // a line passes the names under its own
      });
    const places = Array.from({ length: 2 * most }, (_, row) => covers.filter((place) => isFree(place, row)).map((place) => ({ ...place, row }))).flat();
    placed.push({ at, x, isBeside: sides.length > 0, ...(places[0] ?? { ...covers[0], row: placed.length }) });
  }
  return placed;
}

function dates(y) {
  const { drawn, x, step, width } = shown;
  const last = drawn.length - 1;
  const times = drawn.map(({ some }, at) => some.at(at === last ? -1 : 0).timestamp);
  const digits = Date.parse(times[last]) - Date.parse(times.find(Boolean)) < 2 * DAY ? 16 : 10;
  const parts = Math.max(1, Math.min(last, Math.floor(width / 130) - 1));
  const marks = new Map(); // what is written -> where it is true first
  for (let part = 0; part <= parts; part += 1) {
    const at = Math.round((part * last) / parts);
    const told = times[at] ? written(times[at]).slice(0, digits) : "profile";
    if (!marks.has(told)) marks.set(told, at);
  }
  return [...marks].map(([told, at]) => {
    if (at === 0) return text(x(0), y, "date", "start", told);
    return at === last ? text(x(last + 1), y, "date", "end", told) : text(x(at) + step / 2, y, "date", "middle", told);
  });
}

function legend() {
  const { cells, map, isCoarse, most } = shown;
  const swatch = (kind, more) => svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, rect(0, 0, 18, 12, "strip"), rect(0, 0, 18, 12, kind, more));
  const none = map.weights.flat().reduce((all, one) => all + one, 0) / map.weights.length < 0.999 ? "too little to be named" : "none";
  $("legend").replaceChildren(
    "Share of a head’s attention:",
    ...[1 / 36, 1 / 9, 4 / 9, 1].map((part) => el("span", {}, swatch("cell", ink(part, 1)), percent(part * most))),
    cells.some((one) => one.weights.includes(0)) ? el("span", {}, swatch("unseen"), isCoarse ? "not retrieved" : none) : "",
  );
}

// The event at a place: what it is, and what each head gives it.
async function select(place) {
  const { drawn, left, step } = shown;
  const at = Math.max(0, Math.min(drawn.length - 1, place));
  const { best, some } = drawn[at];
  $("event").value = at;
  $("events").querySelector(".here").setAttribute("x", left + at * step);
  tell(drawn[at]);
  const before = best.title();
  if (some.length === 1) await name([best.item]).catch(() => {}); // of what was not retrieved, no answer has told it
  if (best.title() !== before && drawn === shown.drawn && Number($("event").value) === at) tell(drawn[at]);
}

function tell({ best, some, weights }) {
  const what = best.timestamp ? `${done(best.type)} ${written(best.timestamp)}` : "of the profile";
  const who = some.length > 1 ? `${some.length} events up to ${written(some.at(-1).timestamp)}, most of all “${best.title()}”` : `“${best.title()}”, ${what}`;
  const shares = weights.map((weight, h) => `head ${h + 1} ${weight > 0 ? percent(weight) : shown.isCoarse ? "not retrieved" : "0 %"}`);
  $("told-event").textContent = who;
  $("told-heads").replaceChildren(...shares.map((share) => el("span", {}, share)));
  $("event").setAttribute("aria-valuetext", `${who}: ${shares.join(", ")}`);
}

// ---------------------------------------------------------------------------- the sum, and the table

// The parts of the score, each where the one before it ends, and the score under them.
function sum(found) {
  $("summed-note").textContent = found ? "The part called attention sums up what each event says of the item, weighted by its share." : "Typed words have no score: the picture ends with the weights.";
  const parts = Object.entries(found?.parts ?? {});
  const ends = parts.reduce((all, [, value]) => [...all, all.at(-1) + value], [0]);
  const low = Math.min(...ends);
  const scale = 100 / (Math.max(...ends) - low || 1);
  const line = (told, from, to, kind, more) => {
    const bar = rect((Math.min(from, to) - low) * scale, 0, Math.max(0.8, Math.abs(to - from) * scale), 8, kind);
    return el("li", more, el("span", {}, told), el("span", { class: "number" }, number(to - from)), svg("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" }, bar));
  };
  const kind = ([part, value]) => (value < 0 ? "negative" : part === "attention" ? "mean" : "positive");
  $("sum").replaceChildren(...parts.map((part, at) => line(partName(part[0]), ends[at], ends[at + 1], kind(part), { "data-part": part[0] })));
  if (found) $("sum").append(line("the score", 0, ends.at(-1), "whole", { class: "total" }));
}

function table() {
  const best = strongest(shown.cells, TABLE);
  const row = (one) => el("tr", {}, el("th", { scope: "row" }, one.title()), el("td", {}, one.timestamp ? written(one.timestamp) : ""), one.weights.map((weight) => el("td", { class: "number" }, percent(weight))));
  $("attention").replaceChildren(
    el("caption", {}, best.length < shown.cells.length ? `The ${best.length} events of most weight, of ${count(shown.cells.length)}.` : "Every event, by its weight."),
    el("thead", {}, el("tr", {}, head("event"), head("when"), shown.map.weights.map((_, h) => head(`head ${h + 1}`, true)))),
    el("tbody", {}, best.map(row)),
  );
}
