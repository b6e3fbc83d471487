// Results as you type: debounced, and cancelled when the text has changed meanwhile.

import { post } from "./api.js";
import { $, debounced, el, marked, percent, share, trouble } from "./dom.js";

const QUIET = 25; // milliseconds without a key: few type so fast, and a search takes about as long
const LIMIT = 10;
let running;

export function begin({ user, card }) {
  const look = () => search(user(), card);
  const later = debounced(look, QUIET);
  $("query").addEventListener("input", later);
  $("personal").addEventListener("change", look);
  $("search").addEventListener("submit", (event) => {
    event.preventDefault();
    look();
  });
  return look;
}

async function search(user, card) {
  running?.abort();
  running = new AbortController();
  const query = $("query").value;
  if (!query.trim()) {
    $("results").replaceChildren();
    $("search-note").textContent = "";
    return;
  }
  const asked = { query, limit: LIMIT, highlight: true };
  if (user && $("personal").checked) asked.user_id = user;
  try {
    const answer = await post("v1/search", asked, { signal: running.signal });
    show(answer, card);
    trouble();
  } catch (error) {
    trouble(error);
  }
}

function show(answer, card) {
  const count = answer.items.length;
  const corrections = Object.entries(answer.corrections ?? {}).map(
    ([word, words]) => `“${word}” is taken for “${words.join("”, “")}”`,
  );
  const how =
    answer.retrieval === "exact"
      ? `all ${answer.keys_attended.toLocaleString("en")} titles, descriptions and tags were compared`
      : `${answer.keys_attended.toLocaleString("en")} titles, descriptions and tags were compared, which hold ${percent(answer.mass)}`;
  const told = count ? `The best ${count}; ${how}.` : "Nothing was found.";
  $("search-note").textContent = [...corrections, told].join(". ");
  $("results").replaceChildren(...answer.items.map((item) => result(item, card)));
}

function result(item, card) {
  const texts = item.highlights ?? {};
  const fields = Object.entries(item.matched).filter(([, part]) => part >= 0.005);
  return card(item, {
    title: marked(texts.title, item.title || item.item_id),
    details: [
      texts.description ? el("p", {}, ...marked(texts.description)) : null,
      el("p", {}, `matched in ${fields.map(([name, part]) => `${name} ${percent(part)}`).join(", ")}`),
      share(item.weight, "weight"),
    ],
  });
}
