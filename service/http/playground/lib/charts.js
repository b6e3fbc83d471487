// Lines over time, drawn by uPlot (`vendor/`). A canvas says nothing to those who do not see it, so each chart has a name
// that sums it up, and is given the colours of the page anew whenever its scheme changes.

const { uPlot } = globalThis; // a classic script, which runs before every module
const dark = matchMedia("(prefers-color-scheme: dark)");
const FONT = "12px system-ui, sans-serif";
const EPOCHS = [1, 2, 5, 10, 20, 50, 100, 200, 500]; // steps of the axis: an epoch is whole

// Decimals that tell marks apart which are a step of 1, 2, 2.5 or 5 times a power of ten away from each other.
const digits = (step) => `${step}`.split(".")[1]?.length ?? 0;

// The present value of a custom property, which differs between the schemes.
const colour = (name) => () => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A chart inside `place`, as wide as it. Returns a function that shows data ([xs, ...ys]) under a name.
function chart(place, options, height) {
  const plot = new uPlot({ width: 0, height, ...options }, [[], []], place);
  const picture = plot.root.querySelector(".u-wrap");
  picture.setAttribute("role", "img");
  // A place that is hidden has no width, and gets one when it is opened.
  new ResizeObserver(([{ contentRect }]) => contentRect.width && plot.setSize({ width: contentRect.width, height })).observe(place);
  dark.addEventListener("change", () => plot.redraw(false, true));
  return (data, name) => {
    picture.setAttribute("aria-label", name);
    plot.setData(data);
  };
}

// A small line without axes. Returns a function that shows values at times, from `low` at the bottom to the largest.
export function sparkline(place) {
  let bottom = 0;
  const show = chart(
    place,
    {
      padding: [2, 0, 1, 0],
      cursor: { show: false },
      legend: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: { y: { range: (_, low, high) => [bottom, Math.max(high ?? 0, bottom + 1e-9)] } },
      series: [{}, { stroke: colour("--accent"), fill: colour("--tint"), width: 1.6, spanGaps: true, points: { show: false } }],
    },
    32,
  );
  return (times, values, name, low = 0) => {
    bottom = low;
    show([times, values], name);
  };
}

// Measures by epoch, each a line with a scale of its own: the first at the left, the second at the right. The legend has the
// figures of the epoch under the pointer, or of the last one. Returns a function that shows [epochs, ...figures].
export function epochs(place, measures) {
  const text = (value) => (typeof value === "number" ? value.toPrecision(3) : "–");
  const line = ({ label, ink, dash }, at) => ({
    label,
    scale: label,
    class: `measure-${at + 1}`,
    stroke: colour(ink),
    width: 2,
    dash,
    spanGaps: true,
    points: { show: (plot) => plot.data[0].length < 40, size: 6, fill: colour("--card") },
    value: (plot, value, series, epoch) => text(epoch === null ? plot.data[series].at(-1) : value),
  });
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = ({ label, ink }, at) => ({
    label,
    scale: label,
    side: at ? 1 : 3,
    stroke: colour(ink),
    font: FONT,
    labelFont: FONT,
    labelSize: 20,
    size: 50,
    space: 36,
    grid: at ? { show: false } : grid,
    ticks: { show: false },
    values: (_plot, marks, _axis, _space, step) => marks.map((value) => value.toFixed(digits(step))),
  });
  return chart(
    place,
    {
      padding: [8, measures.length > 1 ? 0 : 12, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { fill: (plot, series) => plot.series[series].stroke() } },
      legend: { markers: { width: 0, fill: null } }, // coloured by the style sheet, which knows the scheme
      scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 1)] } },
      axes: [{ stroke: colour("--faint"), font: FONT, size: 30, incrs: EPOCHS, space: 40, grid, ticks: { show: false } }, ...measures.map(axis)],
      series: [
        { label: "Epoch", value: (plot, value, _, epoch) => `${(epoch === null ? plot.data[0].at(-1) : value) ?? "–"}` },
        ...measures.map(line),
      ],
    },
    240,
  );
}
