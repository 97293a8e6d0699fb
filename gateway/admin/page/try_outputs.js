// The outputs of a call: each as a table, a histogram or an image.

import { createHistogram } from "./chart.js";
import {
  choices,
  dataRow,
  dataTable,
  el,
  labelled,
  nameElement,
  setAttribute,
  setHidden,
  setOptions,
  setText,
  shortName,
} from "./dom.js";
import * as say from "./format.js";
import { imageLayouts, MOST_SIDE, showPicture } from "./try_image.js";

const MOST_OUTPUTS = 100;
const MOST_ROWS = 1000;
/** The rows at first. */
const ROWS = 100;
const MOST_TEXT = 300;

const COLUMNS = [{ label: "Index" }, { label: "Value" }];

const RANGES = [
  ["own", "minimum to maximum"],
  ["bytes", "0 to 255"],
  ["unit", "0 to 1"],
];

/** Create the outputs of a call. */
export function createOutputs(outputs) {
  const left = outputs.length - MOST_OUTPUTS;
  return el(
    "div",
    { class: "columns" },
    ...outputs.slice(0, MOST_OUTPUTS).map(createOutput),
    left > 0 ? el("p", { class: "muted" }, `and ${say.plural(left, "more output")}`) : null,
  );
}

function createOutput(output, number) {
  const views = { table: () => createTable(output, number) };
  if (output.histogram) {
    views.histogram = () => createHistogram({ label: "Values", ...output.histogram });
  }
  const layouts = pictureLayouts(output);
  if (layouts.length) views.image = () => createPicture(output, layouts, number);
  const names = { table: "Table", histogram: "Histogram", image: "Image" };
  const view = el("div");
  const show = (name) => view.replaceChildren(views[name]());
  const options = Object.keys(views).map((name) => [name, names[name]]);
  show("table");
  return el(
    "section",
    { class: "output" },
    el(
      "div",
      { class: "title-row" },
      el("h3", {}, nameElement(output.name, 60)),
      options.length > 1
        ? choices(`View of ${shortName(output.name, 40)}`, options, "table", show)
        : null,
    ),
    el("p", { class: "summary" }, factsText(output)),
    view,
  );
}

function factsText({ datatype, shape, elements, minimum, maximum, mean, nonfinite }) {
  const parts = [datatype, say.shapeText(shape), say.plural(elements, "value")];
  if (typeof minimum === "number") {
    parts.push(`minimum ${say.precise(minimum)}`, `maximum ${say.precise(maximum)}`);
  }
  if (typeof mean === "number") parts.push(`mean ${say.precise(mean)}`);
  if (nonfinite) parts.push(`${say.count(nonfinite)} not finite`);
  return parts.join(" · ");
}

function createTable({ name, shape, values, elements }, number) {
  const table = dataTable(`Values of ${shortName(name, 40)}`, COLUMNS, { class: "compact" });
  const most = Math.min(values.length, MOST_ROWS);
  const note = el("p", { class: "muted" });
  const more = el("button", { type: "button", onclick: () => show(most) }, "Show more rows");
  let shown = 0;

  function show(wanted) {
    const rows = values.slice(shown, wanted).map((value, index) => {
      const place = indexText(shown + index, shape);
      return dataRow(COLUMNS, [place, el("span", { dir: "auto" }, valueText(value))]);
    });
    table.body.append(...rows);
    shown = Math.max(shown, Math.min(wanted, most));
    setHidden(more, shown >= most);
    setText(
      note,
      shown < elements ? `the first ${say.count(shown)} of ${say.count(elements)}` : "",
    );
  }

  show(Math.min(ROWS, most));
  return el(
    "div",
    {},
    el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": `Output ${number + 1}` },
      table.node,
    ),
    el("p", { class: "buttons" }, more, note),
  );
}

/** Return where an element is, by dimensions: "[0, 2]". */
export function indexText(index, shape) {
  const places = [];
  let rest = index;
  for (const size of [...shape].reverse()) {
    places.unshift(rest % size);
    rest = Math.floor(rest / size);
  }
  return `[${places.join(", ")}]`;
}

function valueText(value) {
  if (value === null) return "not finite";
  const text = String(value);
  return text.length > MOST_TEXT
    ? `${text.slice(0, MOST_TEXT)} … ${say.count(text.length - MOST_TEXT)} more characters`
    : text;
}

/** Return the layouts by which an output can be shown as an image. */
function pictureLayouts(output) {
  return imageLayouts(output).filter((layout) => {
    const { width, height, rows } = pictureOf(output, layout, 0);
    return Math.min(width, height) > 1 && width <= MOST_SIDE && rows > 0;
  });
}

/**
 * Return an image of an output: `at(colour, pixel)` is the place of a value in `values`.
 * Of a large output only the first values are known, so it may have fewer rows, and one colour.
 */
function pictureOf({ shape, values }, layout, wanted) {
  const size = (letter) => shape[layout.indexOf(letter)] ?? 1;
  const [images, colours, height, width] = ["N", "C", "H", "W"].map(size);
  const isInterleaved = layout.endsWith("HWC");
  const pixels = height * width;
  const known = Math.min(images, Math.ceil(values.length / (colours * pixels)));
  const image = Math.max(0, Math.min(known - 1, Math.floor(wanted)));
  const own = values.slice(image * colours * pixels, (image + 1) * colours * pixels);
  const whole = own.length === colours * pixels;
  const shown = whole || isInterleaved ? colours : 1;
  const rows = Math.min(height, Math.floor(own.length / (isInterleaved ? colours * width : width)));
  return {
    known,
    values: own,
    colours: shown,
    height,
    width,
    rows,
    isWhole: whole,
    at: (colour, pixel) => (isInterleaved ? pixel * colours + colour : colour * pixels + pixel),
  };
}

function drawPicture(canvas, { values, colours, width, rows, at }, [low, high]) {
  const picture = new ImageData(width, rows);
  const scale = high > low ? 255 / (high - low) : 0;
  for (let pixel = 0; pixel < width * rows; pixel += 1) {
    for (let colour = 0; colour < 3; colour += 1) {
      const value = values[at(Math.min(colour, colours - 1), pixel)];
      if (value === null) continue;
      picture.data[4 * pixel + colour] = (Number(value) - low) * scale;
      picture.data[4 * pixel + 3] = 255; // what is not finite is transparent
    }
  }
  showPicture(canvas, picture);
}

function createPicture(output, layouts, number) {
  const id = `try-output-${number}`;
  const label = `${shortName(output.name, 40)} as an image`;
  const canvas = el("canvas", { class: "preview", role: "img", "aria-label": label });
  const note = el("p", { class: "muted" });
  const layout = el("select", { id: `${id}-layout`, onchange: show });
  const range = el("select", { id: `${id}-range`, onchange: show });
  const which = el("input", { type: "number", id: `${id}-which`, min: "0", oninput: show });
  const whichField = labelled("Image", which);
  const layoutField = labelled("Layout", layout);
  const ranges = { own: [output.minimum, output.maximum], bytes: [0, 255], unit: [0, 1] };
  which.value = "0";
  setOptions(
    layout,
    layouts.map((each) => [each, each]),
  );
  setOptions(range, RANGES);
  setHidden(layoutField, layouts.length < 2);

  function show() {
    const picture = pictureOf(output, layout.value, Number(which.value) || 0);
    setHidden(whichField, picture.known < 2);
    setAttribute(which, "max", picture.known - 1);
    drawPicture(canvas, picture, ranges[range.value]);
    const rows = `${say.count(picture.rows)} of ${say.count(picture.height)} rows`;
    const missing = `Only the first ${say.plural(output.values.length, "value")} came: ${rows}`;
    const colour = picture.colours < 3 && layout.value.includes("C") ? " of the first colour" : "";
    setText(note, picture.isWhole ? "" : `${missing}${colour}.`);
  }

  show();
  return el(
    "div",
    {},
    el("div", { class: "fields" }, layoutField, labelled("Black to white", range), whichField),
    canvas,
    note,
  );
}
