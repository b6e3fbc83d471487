// Small charts in SVG: each is named for those who do not see it, and its figures stand beside it as text.

import { el, svg } from "./dom.js";
import { percent } from "./format.js";

// A share from 0 to 1, as a bar and as a number beside it.
export function share(value, label, text = percent(value)) {
  const filled = el("span");
  filled.style.width = `${Math.max(0, Math.min(1, value)) * 100}%`;
  return el(
    "div",
    { class: "share" },
    el("div", { class: "bar", role: "img", "aria-label": `${label}: ${text}` }, filled),
    el("span", { class: "number" }, text),
  );
}

// A signed amount, to the left or to the right of a line in the middle.
export function signed(value, largest) {
  const width = largest > 0 ? Math.min(1, Math.abs(value) / largest) * 50 : 0;
  return svg(
    "svg",
    { viewBox: "0 0 100 8", preserveAspectRatio: "none", height: "12", "aria-hidden": "true" },
    svg("rect", { x: value < 0 ? 50 - width : 50, y: 1, width, height: 6, class: value < 0 ? "negative" : "positive" }),
    svg("line", { x1: 50, x2: 50, y1: 0, y2: 8, class: "axis", "stroke-width": 0.5 }),
  );
}

// A line of values from the left to the right, from 0 (or `low`) at the bottom to the largest at the top.
export function sparkline(values, label, low = 0) {
  const top = Math.max(...values, low + 1e-9);
  const x = (at) => (values.length > 1 ? (100 * at) / (values.length - 1) : 100);
  const y = (value) => 29 - (27 * (value - low)) / (top - low);
  const points = values.map((value, at) => `${x(at).toFixed(2)},${y(value).toFixed(2)}`);
  return svg(
    "svg",
    { viewBox: "0 0 100 30", preserveAspectRatio: "none", class: "sparkline", role: "img", "aria-label": label },
    ...(points.length > 1
      ? [
          svg("polygon", { points: `0,30 ${points.join(" ")} 100,30` }),
          svg("polyline", { points: points.join(" "), "vector-effect": "non-scaling-stroke" }),
        ]
      : [svg("line", { x1: 0, x2: 100, y1: 29, y2: 29, class: "waiting", "vector-effect": "non-scaling-stroke" })]),
  );
}

// A line through points [x, y], with the ends of both axes in words.
export function lineChart(points, label, unit) {
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const at = ([x, y]) => `${right > left ? (100 * (x - left)) / (right - left) : 50},${high > low ? 57 - (54 * (y - low)) / (high - low) : 30}`;
  const told = `${label}: from ${digits(ys[0])} to ${digits(ys.at(-1))}, ${unit} ${left} to ${right}`;
  const line = svg(
    "svg",
    { viewBox: "0 0 100 60", preserveAspectRatio: "none", class: "line", role: "img", "aria-label": told },
    ...[3, 30, 57].map((y) => svg("line", { x1: 0, x2: 100, y1: y, y2: y, class: "grid", "vector-effect": "non-scaling-stroke" })),
    svg("polyline", { points: points.map(at).join(" "), "vector-effect": "non-scaling-stroke" }),
  );
  return el(
    "div",
    { class: "chart" },
    el("span", { class: "high" }, digits(high)),
    line,
    el("span", { class: "low" }, digits(low)),
    el("span", { class: "left" }, `${unit} ${left}`),
    el("span", { class: "right" }, `${right}`),
  );
}

const digits = (value) => value.toPrecision(3);
