// Elements, bars and words. Texts are only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "class") made.className = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function svg(name, properties = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(properties)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A share from 0 to 1, as a bar and as a number beside it.
export function share(value, label) {
  const filled = el("span");
  filled.style.width = `${Math.max(0, Math.min(1, value)) * 100}%`;
  return el(
    "div",
    { class: "share" },
    el("div", { class: "bar", role: "img", "aria-label": `${label}: ${percent(value)}` }, filled),
    el("span", { class: "number" }, percent(value)),
  );
}

// A signed amount, to the left or to the right of a line in the middle.
export function signed(value, largest) {
  const width = largest > 0 ? Math.min(1, Math.abs(value) / largest) * 50 : 0;
  return svg(
    "svg",
    { viewBox: "0 0 100 8", preserveAspectRatio: "none", height: "12", "aria-hidden": "true" },
    svg("rect", {
      x: value < 0 ? 50 - width : 50,
      y: 1,
      width,
      height: 6,
      class: value < 0 ? "negative" : "positive",
    }),
    svg("line", { x1: 50, x2: 50, y1: 0, y2: 8, class: "axis", "stroke-width": 0.5 }),
  );
}

export function number(value, digits = 3) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(value) {
  return value > 0 && value < 0.001 ? "< 0.1 %" : `${(100 * value).toFixed(1)} %`;
}

export function when(timestamp) {
  const time = new Date(timestamp);
  const shown = time.toISOString().slice(0, 16).replace("T", " ");
  return el("time", { datetime: timestamp, title: timestamp }, shown);
}

// Parts of a text, those that match marked.
export function marked(parts, otherwise) {
  if (!parts) return [otherwise];
  return parts.map((part) => (part.match ? el("mark", {}, part.text) : part.text));
}

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

export function trouble(error) {
  if (error?.name === "AbortError") return;
  if (error?.status === 401 || error?.status === 403) return; // a key is asked for instead
  const told = $("trouble");
  told.hidden = !error;
  told.textContent = error ? `${error.message ?? error}` : "";
  if (error) setTimeout(() => (told.hidden = true), 8000);
}
