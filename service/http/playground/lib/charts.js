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
