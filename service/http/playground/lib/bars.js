// Bars: each has its figure beside it as text.

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
