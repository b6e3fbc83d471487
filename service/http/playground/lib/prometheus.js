// The text format of Prometheus, as far as the page reads it: rates and quantiles between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

function parsed(text) {
  return text.split("\n").flatMap((line) => {
    const found = LINE.exec(line);
    if (!found) return [];
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    return [{ name: found[1], labels, value: Number(found[3]) }];
  });
}

// What the page draws of one reading: one namespace, the default where it is among several. Workers count apart:
// counters are added, and gauges are the same in each.
export function reading(text) {
  const all = parsed(text).filter((row) => row.labels.namespace);
  const shown = all.some((row) => row.labels.namespace === "default") ? "default" : all[0]?.labels.namespace;
  const rows = all.filter((row) => row.labels.namespace === shown);
  const gauge = (name) => {
    const values = rows.filter((row) => row.name === `heed_${name}`).map((row) => row.value);
    return values.length ? Math.max(...values) : null;
  };
  const routes = { all: [0, 0, 0] }; // requests, those refused (429, 503), errors
  const buckets = {};
  for (const { name, labels, value } of rows) {
    const { le, method, route, status } = labels;
    if (name === "heed_namespace_request_duration_seconds_bucket") buckets[le] = (buckets[le] ?? 0) + value;
    if (name !== "heed_namespace_requests_total") continue;
    for (const counts of [routes.all, (routes[`${method} ${route}`] ??= [0, 0, 0])]) {
      counts[0] += value;
      if (status === "429" || status === "503") counts[1] += value;
      else if (status >= "500") counts[2] += value;
    }
  }
  return {
    at: Date.now() / 1000,
    items: gauge("items"),
    events: gauge("events"),
    users: gauge("users"),
    requests: routes.all[0],
    failed: routes.all[1] + routes.all[2],
    routes,
    buckets,
  };
}

const NOTHING = { at: 0, requests: 0, failed: 0, buckets: {} };

// What was counted between two readings; from the start of the service where the first is missing.
export function between(before, after) {
  const from = before && before.requests <= after.requests ? before : NOTHING; // else it was started again
  const seconds = from.at ? after.at - from.at : null;
  const requests = after.requests - from.requests;
  const bounds = Object.entries(after.buckets).map(([le, value]) => [Number(le.replace("+Inf", "Infinity")), value - (from.buckets[le] ?? 0)]);
  bounds.sort((one, other) => one[0] - other[0]);
  return { at: after.at, seconds, requests, failed: after.failed - from.failed, rate: seconds ? requests / seconds : null, bounds };
}

// The quantile of a histogram, by linear interpolation inside its bucket; NaN of none.
export function quantile(bounds, q) {
  const wanted = q * (bounds.at(-1)?.[1] ?? 0);
  if (!wanted) return NaN;
  let [low, below] = [0, 0];
  for (const [high, sum] of bounds) {
    if (sum >= wanted) return high === Infinity ? low : low + ((high - low) * (wanted - below)) / Math.max(sum - below, 1e-9);
    [low, below] = [high, sum];
  }
  return low;
}
