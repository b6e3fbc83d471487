// The API key: sent with each request, and kept until the tab is closed.

import { $ } from "../lib/dom.js";

const NAME = "heed-key";
const kept = () => sessionStorage.getItem(NAME);

// Without keys, `/?namespace=NAME` chooses what this tab shows.
const chosen = new URLSearchParams(location.search).get("namespace");
if (chosen) sessionStorage.setItem("heed-namespace", chosen);
const namespace = sessionStorage.getItem("heed-namespace");

export const given = () => ({
  ...(kept() && { authorization: `Bearer ${kept()}` }),
  ...(namespace && !kept() && { "heed-namespace": namespace }),
});

export function begin() {
  if (namespace && !kept()) document.querySelector(".promise").textContent = document.title = `Heed: ${namespace}`;
  $("change-key").hidden = !kept();
  $("change-key").addEventListener("click", () => want("Change the key", "The key in use is replaced by the next."));
  $("give-key").addEventListener("submit", () => {
    sessionStorage.setItem(NAME, $("given-key").value.trim());
    location.reload(); // everything that was refused is asked for again
  });
  $("forget-key").addEventListener("click", () => {
    sessionStorage.removeItem(NAME);
    location.reload();
  });
}

// To be told of every answer that was no success.
export function refused(status) {
  if (status === 401 && kept()) want("The key was not accepted", "Give another: this one is unknown or has been withdrawn.");
  else if (status === 401) want("A key is needed", "This service answers only those who have one. Ask whoever runs it.");
  else if (status === 403) want("The key is not enough", "It is known, but may not do this. Give one that may.");
}

function want(title, note) {
  const already = !$("key").hidden;
  $("key-title").textContent = title;
  $("key-note").textContent = note;
  $("key").hidden = false;
  $("forget-key").hidden = !kept();
  if (!already) $("given-key").focus();
}
