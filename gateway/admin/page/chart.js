// Small line charts and histograms, drawn as SVG, each with its text alternative.

import { el, setAttribute, setText, svg } from "./dom.js";
import { clock, count, plural, precise, seconds } from "./format.js";

const WIDTH = 300;
/** Steps without a value that a line crosses: a busy machine measures less often. */
const BRIDGE = 10;

/**
 * Create a chart of one value over time. `format` says a value with its unit.
 * `tall` charts have a scale, and show the value under the pointer.
 */
export function createChart({ label, format, height = 24, tall = false, kind = "plain" }) {
  const area = svg("path", { class: "area" });
  const line = svg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
  const pointer = svg("line", { class: "pointer", y1: 0, y2: height, visibility: "hidden" });
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
      class: "chart",
      "data-kind": kind,
    },
    area,
    line,
    tall ? pointer : null,
  );
  const top = el("span", { class: "scale" });
  const foot = el("span", { class: "foot" });
  const node = tall
    ? el("div", { class: "chart-box" }, picture, el("div", { class: "axis" }, foot, top))
    : picture;
  let shown = null;
  let over = null;

  if (tall) {
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      over = (event.clientX - box.left) / box.width;
      readOut();
    });
    picture.addEventListener("pointerleave", () => {
      over = null;
      readOut();
    });
  }

  function readOut() {
    if (!shown) return;
    const { values, end, step, span } = shown;
    if (over === null) {
      setAttribute(pointer, "visibility", "hidden");
      setText(foot, `last ${seconds(span * step)}`);
      return;
    }
    const back = Math.round((1 - over) * (span - 1));
    const x = WIDTH - (back * WIDTH) / (span - 1);
    setAttribute(pointer, "x1", x);
    setAttribute(pointer, "x2", x);
    setAttribute(pointer, "visibility", "visible");
    setText(
      foot,
      `${clock(end - back * step)}: ${format(values[values.length - 1 - back] ?? null)}`,
    );
  }

  return {
    node,
    /** Show values, oldest first, of which the last is of the time `end`; null is a gap. */
    update(values, { end, step, span = values.length }) {
      const numbers = values.filter((value) => value !== null && value !== undefined);
      const most = numbers.length ? Math.max(...numbers) : 0;
      const scale = niceTop(most);
      shown = { values, end, step, span: Math.max(span, 2) };
      const { strokes, fills } = paths(values, shown.span, scale, height);
      setAttribute(line, "d", strokes);
      setAttribute(area, "d", fills);
      setAttribute(picture, "data-kind", most > 0 ? kind : "plain");
      const least = numbers.length ? format(Math.min(...numbers)) : "";
      const last = numbers.length ? format(values.at(-1) ?? null) : "";
      setAttribute(
        picture,
        "aria-label",
        numbers.length
          ? `${label}, last ${seconds(shown.span * step)}: now ${last}, least ${least}, most ${format(most)}`
          : `${label}: no values yet`,
      );
      if (tall) {
        setText(top, numbers.length ? `scale to ${format(scale)}` : "no values yet");
        readOut();
      }
    },
  };
}

function paths(values, span, scale, height) {
  const step = WIDTH / (span - 1);
  const first = span - values.length;
  let strokes = "";
  let fills = "";
  let begin = null;
  let last = null;
  const close = () => {
    if (begin === null) return;
    // A lone value is a dot.
    if (begin === last) strokes += "h1.5";
    fills += `L${x(last)} ${height}Z`;
    begin = null;
  };
  const x = (index) => ((first + index) * step).toFixed(1);
  values.forEach((value, index) => {
    if (value === null || value === undefined) return;
    const y = (height - 1 - (value / scale) * (height - 2)).toFixed(1);
    if (begin !== null && index - last > BRIDGE) close();
    if (begin === null) {
      begin = index;
      strokes += `M${x(index)} ${y}`;
      fills += `M${x(index)} ${height}L${x(index)} ${y}`;
    } else {
      strokes += `L${x(index)} ${y}`;
      fills += `L${x(index)} ${y}`;
    }
    last = index;
  });
  close();
  return { strokes, fills };
}

/** Return the top of a scale: a round number. */
export function niceTop(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 7.5, 10]
    .map((factor) => factor * power)
    .find((top) => top >= most * 0.999);
}

/** Create a histogram: `counts` of values in steps of the same width from `low` to `high`. */
export function createHistogram({ label, low, high, counts, height = 90 }) {
  const most = Math.max(1, ...counts);
  const total = counts.reduce((sum, each) => sum + each, 0);
  const edge = (index) => precise(low + ((high - low) * index) / counts.length);
  const range = (index) => `${edge(index)} to ${edge(index + 1)}`;
  const width = WIDTH / counts.length;
  const bars = counts.map((each, index) => {
    // A few values beside very many are seen too.
    const size = each ? Math.max(1, (each / most) * height) : 0;
    return svg(
      "rect",
      {
        class: "bar",
        x: (index * width).toFixed(2),
        y: (height - size).toFixed(2),
        width: (0.92 * width).toFixed(2),
        height: size.toFixed(2),
      },
      svg("title", {}, `${range(index)}: ${plural(each, "value")}`),
    );
  });
  const highest = counts.indexOf(most);
  const text =
    `${label}: ${plural(total, "value")} from ${precise(low)} to ${precise(high)}` +
    (highest < 0 ? "" : `; most, ${count(most)}, from ${range(highest)}`);
  const picture = svg(
    "svg",
    {
      viewBox: `0 0 ${WIDTH} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": text,
      class: "chart histogram",
    },
    ...bars,
  );
  const axis = el(
    "div",
    { class: "axis" },
    el("span", {}, precise(low)),
    el("span", {}, `scale to ${plural(most, "value")}`),
    el("span", {}, precise(high)),
  );
  return el("div", { class: "chart-box" }, picture, axis);
}
