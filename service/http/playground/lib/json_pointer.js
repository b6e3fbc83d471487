// The place in a JSON text that a pointer (RFC 6901) names.

const TOKEN = /\s*("(?:[^"\\]|\\.)*"|[{}[\]:,]|[^\s{}[\]:,"]+)/y;

// [start, end] of the value, or of the innermost one around it that exists: a field may be missing.
export function locate(text, pointer) {
  const steps = pointer.split("/").slice(1).map((step) => step.replaceAll("~1", "/").replaceAll("~0", "~"));
  TOKEN.lastIndex = 0;
  let best = null;
  const next = () => {
    const found = TOKEN.exec(text);
    return found && { text: found[1], start: TOKEN.lastIndex - found[1].length, end: TOKEN.lastIndex };
  };
  // `left` are the steps that remain, null off the way; returns the token after the value's end.
  const value = (token, left) => {
    const start = token.start;
    let end = token.end;
    if (token.text === "{" || token.text === "[") {
      const isObject = token.text === "{";
      let inner = next();
      for (let at = 0; inner && inner.text !== "}" && inner.text !== "]"; at += 1) {
        const name = isObject ? JSON.parse(inner.text) : `${at}`;
        if (isObject) {
          next(); // the colon
          inner = next();
        }
        value(inner, left?.length && left[0] === name ? left.slice(1) : null);
        inner = next();
        if (inner?.text === ",") inner = next();
      }
      end = inner?.end ?? text.length;
    }
    if (left && (!best || left.length < best.left)) best = { left: left.length, range: [start, end] };
  };
  const first = next();
  if (first) value(first, steps);
  return best?.range ?? [0, 0];
}
