// Pictures, prices and other fields of items, as the settings map them (HEED_PAGE_FIELDS).

import { get } from "./api.js";

const ROLES = new Set(["image", "url", "price", "currency", "subtitle"]);
let mapping = {}; // role or label -> field

export async function load() {
  mapping = (await get("playground/settings.json")).fields;
}

// Fields to ask for with each item.
export const wanted = () => [...new Set(["categories", ...Object.values(mapping)])].filter((name) => name !== "title" && name !== "item_id");

// A value of an item by its field: `attributes.a.b` is a member of an object, or has a dot in its name.
function read(item, field) {
  const held = item.fields ?? item;
  if (!field.startsWith("attributes.")) return held[field] ?? item[field];
  const walk = (object, name) => {
    if (object === null || typeof object !== "object") return undefined;
    if (name in object) return object[name];
    for (let dot = name.indexOf("."); dot > 0; dot = name.indexOf(".", dot + 1)) {
      const found = walk(object[name.slice(0, dot)], name.slice(dot + 1));
      if (found !== undefined) return found;
    }
    return undefined;
  };
  const name = field.slice("attributes.".length);
  return held[field] ?? walk(held.attributes, name);
}

const text = (value) => (Array.isArray(value) ? value.join(", ") : value === null || value === undefined || typeof value === "object" ? "" : `${value}`);

// Only addresses of pages are followed: a catalogue may hold any text.
function address(value) {
  try {
    const url = new URL(text(Array.isArray(value) ? value[0] : value));
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function price(value, currency) {
  if (typeof value !== "number") return text(value);
  try {
    return value.toLocaleString("en", currency ? { style: "currency", currency } : { minimumFractionDigits: 2 });
  } catch {
    return `${value} ${currency}`; // no currency that is known
  }
}

// The field of a role, if it has one.
export const mapped = (role) => mapping[role];

export const hasPictures = () => "image" in mapping;

// The text of HTML.
export const plain = (text) => (/<\/\w|&\w+;/.test(text) ? new DOMParser().parseFromString(text.replace(/<style.*?<\/style>/gs, "").replaceAll("</", " </"), "text/html").body.textContent : text);

// What is shown of an item.
export function shown(item) {
  const of = (role) => (mapping[role] ? read(item, mapping[role]) : undefined);
  const value = of("price");
  return {
    name: item.title || item.item_id,
    image: address(of("image")),
    url: address(of("url")),
    price: value === undefined ? "" : price(value, text(of("currency"))),
    subtitle: text(mapping.subtitle ? of("subtitle") : read(item, "categories")),
    labels: Object.keys(mapping).filter((name) => !ROLES.has(name)).map((name) => [name, text(of(name))]).filter(([, told]) => told),
  };
}
