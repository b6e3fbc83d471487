// One item: what people do with it, and what is stored of it, edited, hidden and shown again.

import { ask, get, itemPath } from "../lib/api.js";
import { button, $, el, say, trouble } from "../lib/dom.js";
import { shown } from "../lib/fields.js";
import { jsonEditor } from "../lib/json_editor.js";
import { picture } from "../explore/card.js";
import { company } from "./company.js";
import { itemForm } from "./item_form.js";
import { mergePatch } from "./merge_patch.js";

const EDITED = ["title", "description", "tags", "categories", "attributes", "published_at"];
let current = "";

// `changed(item)` is called with the item as it is after a change.
export async function showItem(id, changed) {
  current = id;
  const [item, read] = await stored(id);
  if (id !== current) return;
  if (item) draw(item, read, changed);
  else $("catalogue-one").replaceChildren(back(), el("h2", {}, id), el("p", { class: "note" }, "There is no such item. Events may name items that are not in the catalogue."));
}

// The item as it is stored, and as it is read: without markup.
const stored = (id) =>
  Promise.all(["", "?plain=true"].map((how) => get(itemPath(id) + how))).catch((error) => {
    if (error.status !== 404) throw error;
    return [];
  });

const back = () => el("p", { class: "back" }, el("a", { href: "#/catalogue" }, "The whole catalogue"));

function draw(item, read, changed) {
  const { name, url, price, subtitle, labels } = shown(read);
  const change = async (patch) => {
    await ask("PATCH", itemPath(item.item_id), patch);
    const [saved, again] = await stored(item.item_id);
    changed(again);
    if (current === item.item_id) draw(saved, again, changed);
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
    ...[picture(read)].filter(Boolean),
    el("h2", {}, name, item.hidden ? el("span", { class: "badge" }, "hidden") : null),
    el("p", { class: "beside" }, [price, subtitle].filter(Boolean).join(" · ")),
    el("p", { class: "beside" }, "id ", el("code", {}, item.item_id)),
    ...[labels.length && el("dl", { class: "labels" }, labels.map(([label, told]) => el("div", {}, el("dt", {}, label), el("dd", {}, told)))), read.description && el("p", { class: "description" }, read.description)].filter(Boolean),
    el(
      "div",
      { class: "actions" },
      button(item.hidden ? "Show again" : "Hide from every answer", hide, { id: "hide-item" }),
      url ? el("a", { class: "action", href: url, target: "_blank", rel: "noreferrer noopener" }, "Open its page") : null,
    ),
    item.hidden ? "" : company(item),
    el("h3", {}, "Edit"),
    itemForm(value, save),
    el("details", {}, el("summary", {}, "Every field as JSON"), jsonEditor({ label: "Item as JSON; only what you change is sent", value, save, rows: 18 })),
  );
}
