// One item: what is stored of it, edited as JSON, hidden and shown again.

import { ask, get, itemPath } from "../lib/api.js";
import { button, $, el, say, trouble } from "../lib/dom.js";
import { plain, shown } from "../lib/fields.js";
import { jsonEditor } from "../lib/json_editor.js";
import { picture } from "../explore/card.js";
import { mergePatch } from "./merge_patch.js";

const EDITED = ["title", "description", "tags", "categories", "attributes", "published_at"];
let current = "";

// `changed(item)` is called with the item as it is after a change.
export async function showItem(id, changed) {
  current = id;
  let item;
  try {
    item = await get(itemPath(id));
  } catch (error) {
    if (error.status !== 404) throw error;
  }
  if (id !== current) return;
  if (item) draw(item, changed);
  else $("catalogue-one").replaceChildren(back(), el("h2", {}, id), el("p", { class: "note" }, "There is no such item. Events may name items that are not in the catalogue."));
}

const back = () => el("p", { class: "back" }, el("a", { href: "#/catalogue" }, "The whole catalogue"));

function draw(item, changed) {
  const { name, url, price, subtitle, labels } = shown(item);
  const change = async (patch) => {
    const saved = await ask("PATCH", itemPath(item.item_id), patch);
    changed(saved);
    if (current === item.item_id) draw(saved, changed);
    return saved;
  };
  const value = Object.fromEntries(EDITED.map((field) => [field, item[field]]));
  const save = async (edited) => {
    const patch = mergePatch(value, edited);
    if (!Object.keys(patch).length) return say("Nothing has changed.");
    await change(patch);
    return say(`Saved: ${Object.keys(patch).join(", ")}.`);
  };
  const hide = () =>
    change({ hidden: !item.hidden })
      .then((saved) => {
        say(saved.hidden ? "Hidden: it is in no answer, and stays in histories." : "Shown again.");
        $("hide-item").focus();
      })
      .catch(trouble);
  $("catalogue-one").replaceChildren(
    back(),
    ...[picture(item)].filter(Boolean),
    el("h2", {}, name, item.hidden ? el("span", { class: "badge" }, "hidden") : null),
    el("p", { class: "beside" }, [price, subtitle].filter(Boolean).join(" · ")),
    el("p", { class: "beside" }, "id ", el("code", {}, item.item_id)),
    ...[labels.length && el("dl", { class: "labels" }, labels.map(([label, told]) => el("div", {}, el("dt", {}, label), el("dd", {}, told)))), item.description && el("p", { class: "description" }, plain(item.description))].filter(Boolean),
    el(
      "div",
      { class: "actions" },
      button(item.hidden ? "Show again" : "Hide from every answer", hide, { id: "hide-item" }),
      url ? el("a", { class: "action", href: url, target: "_blank", rel: "noreferrer noopener" }, "Open its page") : null,
    ),
    el("h3", {}, "Edit"),
    jsonEditor({ label: "Item as JSON; only what you change is sent", value, save, rows: 18 }),
  );
}
