// An editor of JSON: what the service refuses is shown at the place that it names.

import { button, el } from "./dom.js";
import { locate } from "./json_pointer.js";

let number = 0;

// `save(value)` stores what was written, and throws a `Problem` if it is refused.
export function jsonEditor({ label, value, save, word = "Save", rows = 12 }) {
  const id = `json-${(number += 1)}`;
  const area = el("textarea", { id, rows, spellcheck: "false", "aria-describedby": `${id}-errors` });
  area.value = JSON.stringify(value, null, 2);
  const errors = el("ul", { class: "errors" });
  const submit = async () => {
    errors.replaceChildren();
    area.removeAttribute("aria-invalid");
    try {
      await save(parsed(area.value));
    } catch (error) {
      area.setAttribute("aria-invalid", "true");
      errors.replaceChildren(...told(error, area));
    }
  };
  return el("form", { class: "json", onsubmit: submit }, el("label", { for: id }, label), area, el("div", { id: `${id}-errors`, role: "status" }, errors), el("button", { type: "submit" }, word));
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not JSON: ${error.message}`);
  }
}

function told(error, area) {
  if (!error.errors?.length) return [el("li", {}, error.message)];
  mark(area, error.errors[0].pointer);
  return error.errors.map(({ pointer, detail }) =>
    el("li", {}, button(pointer || "the whole", () => mark(area, pointer), { "aria-label": `Go to ${pointer || "the whole"}` }), ` ${detail}`),
  );
}

// Selects the value, and scrolls it into view.
function mark(area, pointer) {
  const [start, end] = locate(area.value, pointer);
  area.focus();
  area.setSelectionRange(start, end);
  const line = area.value.slice(0, start).split("\n").length - 1;
  area.scrollTop = (line - 2) * parseFloat(getComputedStyle(area).lineHeight);
}
