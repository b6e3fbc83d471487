// Versions of the model: their figures beside those of their rivals, and a button that serves them.

import { get, post } from "../lib/api.js";
import { $, button, el, say, trouble } from "../lib/dom.js";
import { count, number, size, when } from "../lib/format.js";
import { changed } from "../explore/session.js";
import * as figures from "../shell/figures.js";

export async function refresh() {
  const [{ models }, ready] = await Promise.all([get("v1/models"), get("health/ready")]);
  const served = ready.checks?.model ?? "";
  $("versions-note").textContent = models.length
    ? "The newest first. Each says what it was worth when it was trained, on events that were held out."
    : "None is trained yet: answers come from content and popularity. Start a training, or run heed train.";
  $("version-list").replaceChildren(...models.toReversed().map((model) => version(model, served)));
}

function version(model, served) {
  const now = model.version === served;
  const { metadata = {} } = model;
  const known = [
    ["made", model.created ? when(model.created) : null],
    ["events", metadata.events && count(metadata.events)],
    ["items", metadata.items && count(metadata.items)],
    ["preset", metadata.preset],
    ["trained in", metadata.seconds && `${number(metadata.seconds, 0)} s`],
    ["size", model.bytes && size(model.bytes)],
  ].filter(([, value]) => value);
  return el(
    "li",
    { "data-version": model.version },
    el(
      "div",
      { class: "about" },
      el("h3", {}, el("span", { class: "version" }, model.version), now ? el("span", { class: "badge" }, "served") : null),
      model.broken ? el("p", { class: "errors" }, `It cannot be served: ${model.broken}`) : null,
      el("dl", { class: "labels" }, known.map(([label, value]) => el("div", {}, el("dt", {}, label), el("dd", {}, value)))),
      metadata.sentence ? el("p", { class: "reason" }, metadata.sentence) : null,
      el("details", { class: "figures" }, el("summary", {}, "Figures"), figures.questions(model).map(judged)),
      model.broken ? null : el("div", { class: "actions" }, serve(model.version, now)),
    ),
  );
}

// A question by which a model was judged: its figures beside those of its rivals.
function judged(question) {
  const bars = Object.entries(figures.NAMES).map(([metric, name]) => {
    const rows = figures.bars(question, metric);
    return rows.length ? el("div", {}, el("p", { class: "metric" }, name), rows) : null;
  });
  return el("div", { class: "question" }, question.title ? el("h4", {}, question.title) : null, el("div", { class: "bars" }, bars));
}

const serve = (version, now) =>
  button(now ? "Served now" : "Serve this version", () => activate(version), { disabled: now, "aria-label": now ? `${version} is served now` : `Serve version ${version}` });

async function activate(version) {
  try {
    const { previous } = await post(`v1/models/${encodeURIComponent(version)}/activate`);
    say(`${version} is served. To roll back, serve ${previous}.`);
    await Promise.all([refresh(), figures.refresh(), changed()]);
  } catch (error) {
    trouble(error);
  }
}
