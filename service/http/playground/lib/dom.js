// Elements. Texts are only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, properties = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);

export const head = (text, numeric) => el("th", { scope: "col", class: numeric ? "number" : null }, text);

// Of calls that come one after the other only the last is made, when it has been quiet for a while.
export function debounced(call, milliseconds) {
  let waiting;
  return (...given) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => call(...given), milliseconds);
  };
}

// A call that is made when first wanted, and again only if it failed.
export function remembered(call) {
  let made;
  return () => {
    made ??= call().catch((error) => {
      made = undefined;
      throw error;
    });
    return made;
  };
}

// What went wrong, for some seconds at the foot of the page; without an error, nothing did.
export function trouble(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401 || error?.status === 403) return; // a key is asked for instead
  if (error) say(`${error.message ?? error}`, "bad");
  else if ($("trouble").className === "bad") say("");
}

export function say(text, kind = "good") {
  const told = $("trouble");
  told.hidden = !text;
  told.className = kind;
  told.textContent = text;
  clearTimeout(say.waiting);
  if (text) say.waiting = setTimeout(() => (told.hidden = true), 8000);
}
