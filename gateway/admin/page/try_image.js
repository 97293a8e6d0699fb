// Turns an image file into a tensor: its layout, its size, and the scale of its values.

import { elementSize, isFloat, NUMERIC_DATATYPES, tensorBytes } from "./bytes.js";
import { el, labelled, setHidden, setOptions, setText } from "./dom.js";
import * as say from "./format.js";

/** Of the tensors of one request. */
const MOST_BYTES = 8 * 2 ** 20;
const MOST_FILE = 50_000_000;
/** Of an image on each side: a larger one is scaled once, as it takes memory. */
export const MOST_SIDE = 4096;

/** The mean and the deviation of red, green, blue and grey, from 0 to 1. */
const IMAGENET = [
  [0.485, 0.229],
  [0.456, 0.224],
  [0.406, 0.225],
  [0.449, 0.226],
];
const GREY = 3;

const SCALES = {
  unit: { label: "0 to 1", of: (value) => value / 255 },
  bytes: { label: "0 to 255", of: (value) => value },
  signed: { label: "−1 to 1", of: (value) => value / 127.5 - 1 },
  imagenet: {
    label: "ImageNet mean and deviation",
    of: (value, colour) => (value / 255 - IMAGENET[colour][0]) / IMAGENET[colour][1],
  },
  shifted: { label: "−128 to 127", of: (value) => value - 128 },
};

const COLOURS = [
  ["3", "RGB"],
  ["1", "grey"],
];

function scalesOf(datatype) {
  if (isFloat(datatype)) return ["unit", "bytes", "signed", "imagenet"];
  return datatype === "INT8" ? ["shifted"] : ["bytes"];
}

/** Return the layouts that a tensor may have as an image, as "NCHW", the likeliest first. */
export function imageLayouts({ datatype, shape }) {
  if (!NUMERIC_DATATYPES.includes(datatype)) return [];
  if (shape.length === 2) return ["HW"];
  if (shape.length < 3 || shape.length > 4) return [];
  const [first, , last] = shape.slice(-3);
  const layouts = [];
  if (isColours(first)) layouts.push("CHW");
  // A number of colours that is fixed says more than a free one.
  if (isColours(last)) layouts[first > 0 || last < 0 ? "push" : "unshift"]("HWC");
  return layouts.map((layout) => "N".repeat(shape.length - 3) + layout);
}

function isColours(size) {
  return size < 0 || size === 1 || size === 3;
}

/**
 * Return the bytes of a tensor from pixels, four bytes each (RGBA) in rows.
 * `shape` has the sizes of `layout`; each image of a batch is the same.
 */
export function imageTensor(pixels, { shape, layout, datatype, scale }) {
  const size = (letter) => shape[layout.indexOf(letter)] ?? 1;
  const [images, colours, height, width] = ["N", "C", "H", "W"].map(size);
  const planes = layout.endsWith("CHW");
  const values = new Float64Array(colours * height * width);
  const { of } = SCALES[scale];
  for (let pixel = 0; pixel < height * width; pixel += 1) {
    for (let colour = 0; colour < colours; colour += 1) {
      const at = planes ? colour * height * width + pixel : pixel * colours + colour;
      values[at] =
        colours === 1 ? of(grey(pixels, 4 * pixel), GREY) : of(pixels[4 * pixel + colour], colour);
    }
  }
  const bytes = tensorBytes(values, datatype);
  const batch = new Uint8Array(images * bytes.length);
  for (let image = 0; image < images; image += 1) batch.set(bytes, image * bytes.length);
  return batch;
}

function grey(pixels, at) {
  return 0.299 * pixels[at] + 0.587 * pixels[at + 1] + 0.114 * pixels[at + 2];
}

/** Create the fields of an image. `onChange()` is called when the layout or the colours change. */
export function createImageFill({ id, onChange }) {
  const file = el("input", { type: "file", id: `${id}-file`, accept: "image/*" });
  const layout = el("select", { id: `${id}-layout` });
  const colours = el("select", { id: `${id}-colours` });
  const scale = el("select", { id: `${id}-scale` });
  const canvas = el("canvas", { class: "preview", role: "img", "aria-label": "The image as sent" });
  const drawing = el("canvas"); // in colours, as the shown one may be grey
  const note = el("p", { class: "muted" });
  const coloursField = labelled("Colours", colours);
  let bitmap = null;
  let failure = "";
  let reading = 0;
  let spec = { datatype: "", shape: [] };
  setOptions(colours, COLOURS);

  file.addEventListener("change", read);
  for (const field of [layout, colours]) field.addEventListener("change", onChange);

  async function read() {
    const ticket = ++reading;
    const [chosen] = file.files;
    let found = null;
    let error = "";
    try {
      if (chosen) found = await readImage(chosen);
    } catch (thrown) {
      error = thrown.message;
    }
    if (ticket !== reading) {
      found?.close();
      return;
    }
    bitmap?.close();
    [bitmap, failure] = [found, error];
    onChange();
  }

  const axis = (letter) => layout.value.indexOf(letter);

  function draw(shape) {
    const [width, height] = [shape[axis("W")], shape[axis("H")]];
    [drawing.width, drawing.height] = [width, height];
    const context = drawing.getContext("2d", { willReadFrequently: true });
    context.fillStyle = "white"; // behind what is transparent
    context.fillRect(0, 0, width, height);
    context.imageSmoothingQuality = "high";
    context.drawImage(bitmap, 0, 0, width, height);
    return context.getImageData(0, 0, width, height);
  }

  /** Return why there is no tensor of this shape; empty if there is one. */
  function failureOf(shape) {
    if (failure) return failure;
    if (!bitmap) return "Choose an image file.";
    if ([axis("W"), axis("H")].some((side) => shape[side] < 1 || shape[side] > MOST_SIDE)) {
      return `Height and width must be from 1 to ${say.count(MOST_SIDE)}.`;
    }
    const size = shape.reduce((product, each) => product * each, elementSize(spec.datatype));
    return size > MOST_BYTES
      ? `This is ${say.bytes(size)}; at most ${say.bytes(MOST_BYTES)} can be sent from here.`
      : "";
  }

  return {
    node: el(
      "div",
      { class: "image-fill" },
      el(
        "div",
        { class: "fields" },
        labelled("Image file", file),
        labelled("Layout", layout),
        coloursField,
        labelled("Scale", scale),
      ),
      canvas,
      note,
    ),
    file,
    axis,
    colours: () => Number(colours.value),
    failure: failureOf,
    /** Offer what an input of this datatype and shape may be. */
    offer(next) {
      spec = next;
      const layouts = imageLayouts(spec);
      setOptions(
        layout,
        layouts.map((each) => [each, each]),
      );
      setOptions(
        scale,
        layouts.length ? scalesOf(spec.datatype).map((each) => [each, SCALES[each].label]) : [],
      );
      setHidden(coloursField, !(spec.shape[axis("C")] < 0));
    },
    /**
     * Show the image as it will be sent; `shape` is null if it is not known.
     * Return what is wrong with the file.
     */
    preview(shape) {
      const wrong = shape === null ? "" : failureOf(shape);
      const shown = shape !== null && !wrong;
      setHidden(canvas, !shown);
      setText(note, failure ? "" : wrong);
      if (!shown) return failure;
      const picture = draw(shape);
      if ((shape[axis("C")] ?? 1) === 1) makeGrey(picture.data);
      showPicture(canvas, picture);
      setText(note, `${sides(bitmap)} pixels, sent as ${sides(picture)}.`);
      return "";
    },
    /** Return the tensor's bytes. */
    tensor: (shape) =>
      imageTensor(draw(shape).data, {
        shape,
        layout: layout.value,
        datatype: spec.datatype,
        scale: scale.value,
      }),
  };
}

/** Decode an image file; raises an Error that says why it cannot. */
async function readImage(file) {
  if (file.size > MOST_FILE) {
    throw new Error(
      `The file has ${say.bytes(file.size)}; at most ${say.bytes(MOST_FILE)} are read.`,
    );
  }
  let image;
  try {
    image = await createImageBitmap(file);
  } catch {
    throw new Error("The browser cannot read this file as an image.");
  }
  const factor = MOST_SIDE / Math.max(image.width, image.height);
  if (factor >= 1) return image;
  const scaled = await createImageBitmap(image, {
    resizeWidth: Math.max(1, Math.round(factor * image.width)),
    resizeHeight: Math.max(1, Math.round(factor * image.height)),
    resizeQuality: "high",
  });
  image.close();
  return scaled;
}

function sides({ width, height }) {
  return `${say.count(width)} × ${say.count(height)}`;
}

function makeGrey(pixels) {
  for (let at = 0; at < pixels.length; at += 4) pixels.fill(grey(pixels, at), at, at + 3);
}

/** Show pixels on a canvas of their size. */
export function showPicture(canvas, picture) {
  [canvas.width, canvas.height] = [picture.width, picture.height];
  canvas.getContext("2d").putImageData(picture, 0, 0);
}
