// The JSON Merge Patch (RFC 7396) that makes one object into another.

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

export function mergePatch(before, after) {
  const patch = {};
  for (const name of Object.keys(before)) if (!(name in after)) patch[name] = null;
  for (const [name, value] of Object.entries(after)) {
    if (isObject(value) && isObject(before[name])) {
      const inner = mergePatch(before[name], value);
      if (Object.keys(inner).length) patch[name] = inner;
    } else if (JSON.stringify(value) !== JSON.stringify(before[name])) patch[name] = value;
  }
  return patch;
}
