// The inputs of a call: each with its shape and what fills it.

import { NUMERIC_DATATYPES, tensorBytes, toBase64 } from "./bytes.js";
import {
  el,
  labelled,
  nameElement,
  setAttribute,
  setHidden,
  setName,
  setOptions,
  setText,
} from "./dom.js";
import { count, plural, shapeText } from "./format.js";
import { createImageFill, imageLayouts } from "./try_image.js";

const MOST_INPUTS = 100;
const MOST_RANK = 16;
/** Characters of values that are parsed as they are typed. */
const SHORT_TEXT = 100_000;
/** Characters of values that can be sent: the gateway takes 16 MiB in all. */
const MOST_TEXT = 15_000_000;
/** The height and the width of an image, where they are free. */
const IMAGE_SIDE = 224;

/** An integer that is not a text. */
const LONG_INTEGER = /(?<!["\d.-])-?\d{16,}(?!["\d.])/g;

const FILLS = [
  ["random", "Random"],
  ["zeros", "Zeros"],
  ["ones", "Ones"],
  ["values", "Values"],
  ["image", "Image"],
  ["none", "Leave it out"],
];

const DATATYPES = ["FP32", ...NUMERIC_DATATYPES.filter((each) => each !== "FP32"), "BOOL", "BYTES"];
const AXES = { N: "Images", C: "Colours", H: "Height", W: "Width" };

/** What is wrong with an input, and the field that is to be changed. */
class InputError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

/** Create the list of inputs. `onChange()` is called when there are more, fewer, or other ones. */
export function createInputs({ onChange }) {
  const node = el("div");
  const add = el("button", { type: "button", onclick: () => addByHand().focus() }, "Add an input");
  const note = el("p", { class: "muted" });
  let inputs = [];
  let created = 0;

  function create(spec, byHand) {
    const input = createInput({ id: `try-input-${++created}`, spec, byHand, onChange, remove });
    inputs.push(input);
    node.append(input.node);
    return input;
  }

  function addByHand() {
    const input = create({ name: `INPUT${inputs.length}`, datatype: "FP32", shape: [1] }, true);
    onChange();
    return input;
  }

  function remove(input) {
    inputs = inputs.filter((each) => each !== input);
    input.node.remove();
    onChange();
    add.focus();
  }

  return {
    node: el("div", { class: "inputs-list" }, node, note, add),
    /** Show the inputs of a model's metadata; without them, the user adds them. */
    show(specs) {
      inputs = [];
      node.replaceChildren();
      setHidden(add, specs !== null);
      const known = (specs ?? []).slice(0, MOST_INPUTS);
      for (const spec of known) create(usable(spec), false);
      const left = (specs?.length ?? 0) - known.length;
      setText(note, left > 0 ? `and ${count(left)} more inputs, which are not sent` : "");
      if (specs === null) addByHand();
      else onChange();
    },
    /** Return the inputs that are sent, as the metadata has them. */
    sent: () => inputs.map((input) => input.sent()).filter(Boolean),
    /** Return the inputs for a request; null, with the errors shown, if they are not valid. */
    read() {
      const found = inputs.map((input) => input.read());
      const invalid = inputs.find((input) => input.hasFailed());
      invalid?.focus();
      return invalid ? null : found.filter(Boolean);
    },
    /** Show an error of the gateway at the input that it names; return whether there is one. */
    showError(text) {
      const sent = inputs.filter((input) => input.sent());
      for (const [index, input] of sent.entries()) {
        const own = `inputs[${index}]`;
        const prefixes = [`input '${input.name()}': `, `${own}: `, `${own}.`];
        const prefix = prefixes.find((each) => text.startsWith(each));
        if (!prefix) continue;
        input.fail(text.slice(prefix.length));
        input.focus();
        return true;
      }
      return false;
    },
  };
}

/** Return the metadata of an input with values of the right types. */
function usable({ name, datatype, shape }) {
  const sizes = Array.isArray(shape) ? shape.slice(0, MOST_RANK).map(Number) : [];
  return {
    name: String(name),
    datatype: String(datatype ?? "").toUpperCase(),
    shape: sizes.map((size) => (size >= 0 ? size : -1)),
  };
}

function createInput({ id, spec: given, byHand, onChange, remove }) {
  let spec = given;
  const title = nameElement("", 60);
  const type = el("span", { class: "muted" });
  const sizesNode = el("span", { class: "fields" });
  const fill = el("select", { id: `${id}-fill` });
  const values = el("textarea", {
    id: `${id}-values`,
    rows: 4,
    spellcheck: "false",
    autocomplete: "off",
    "aria-describedby": `${id}-failure`,
  });
  const valuesField = labelled("JSON", values);
  const failure = el("p", { class: "failure", id: `${id}-failure`, role: "alert" });
  const image = createImageFill({ id: `${id}-image`, onChange: changed });
  const definition = byHand ? createDefinition({ id, spec, onDefine: define }) : null;
  let sizes = new Map();
  const node = el(
    "fieldset",
    { class: "input" },
    el("legend", {}, "Input ", title, " ", type),
    definition?.node,
    el("div", { class: "fields" }, labelled("Fill", fill), sizesNode),
    valuesField,
    image.node,
    failure,
    byHand
      ? el("button", { type: "button", onclick: () => remove(self) }, "Remove this input")
      : null,
  );
  const self = { node, name: () => spec.name, sent, read, fail, hasFailed, focus };
  let failed = null;

  fill.addEventListener("change", () => {
    if (fill.value === "image") proposeImageSize();
    changed();
  });
  values.addEventListener("input", () => {
    clearFailure();
    if (values.value.length < SHORT_TEXT) fitSizes(tryParse());
  });
  values.addEventListener("change", () => fitSizes(check(parse)));
  define(spec);

  /** Take another name, datatype or shape. */
  function define(next) {
    spec = next;
    setName(title, spec.name, 60);
    setText(type, `${spec.datatype}, ${shapeText(spec.shape)}`);
    const isImage = imageLayouts(spec).length > 0;
    setOptions(
      fill,
      FILLS.filter(([value]) => value !== "image" || isImage),
    );
    setAttribute(values, "placeholder", spec.datatype === "BYTES" ? '["a text"]' : "[1, 2.5, -3]");
    createSizes();
    changed();
  }

  function createSizes() {
    const before = sizes;
    sizes = new Map();
    spec.shape.forEach((size, axis) => {
      if (size >= 0) return;
      const field = el("input", {
        type: "number",
        id: `${id}-size-${axis}`,
        min: "0",
        step: "1",
        inputmode: "numeric",
        oninput: changed,
      });
      field.value = before.get(axis)?.field.value ?? "1";
      const box = labelled("", field);
      sizes.set(axis, { field, box, label: box.querySelector("label") });
    });
    sizesNode.replaceChildren(...[...sizes.values()].map(({ box }) => box));
  }

  /** Show the fields that this fill needs, and the image as it will be sent. */
  function changed() {
    clearFailure();
    const isImage = fill.value === "image";
    image.offer(isImage ? spec : { ...spec, datatype: "" });
    for (const [axis, { box, label }] of sizes) {
      setText(label, sizeName(axis));
      setHidden(box, isImage && axis === image.axis("C"));
    }
    setHidden(sizesNode, fill.value === "none" || sizes.size === 0);
    setHidden(valuesField, fill.value !== "values");
    setHidden(image.node, !isImage);
    const wrong = isImage && image.preview(tryShape());
    if (wrong) fail(wrong, image.file);
    onChange();
  }

  function sizeName(axis) {
    const letter = Object.keys(AXES).find((each) => image.axis(each) === axis);
    return fill.value === "image" && letter ? AXES[letter] : `Dimension ${axis + 1}`;
  }

  function proposeImageSize() {
    image.offer(spec);
    for (const letter of ["H", "W"]) {
      const field = sizes.get(image.axis(letter))?.field;
      if (field?.value === "1") field.value = String(IMAGE_SIDE);
    }
  }

  /** Show the sizes of free dimensions that values imply. */
  function fitSizes(parsed) {
    const found = parsed && sizesOf(parsed, spec.shape);
    if (!found) return;
    for (const [axis, { field }] of sizes) field.value = String(found[axis]);
  }

  function readShape() {
    return spec.shape.map((size, axis) => {
      if (size >= 0) return size;
      if (fill.value === "image" && axis === image.axis("C")) return image.colours();
      const { field } = sizes.get(axis);
      const value = Number(field.value);
      if (field.value === "" || !Number.isSafeInteger(value) || value < 0) {
        throw new InputError(`${sizeName(axis)}: this must be a whole number.`, field);
      }
      return value;
    });
  }

  function tryShape() {
    try {
      return readShape();
    } catch {
      return null;
    }
  }

  function parse() {
    try {
      return parseValues(values.value, spec.datatype);
    } catch (error) {
      throw new InputError(`This is not JSON: ${error.message}`, values);
    }
  }

  function tryParse() {
    try {
      return parse();
    } catch {
      return null;
    }
  }

  function sent() {
    return fill.value === "none" ? null : spec;
  }

  /** Return the input for a request; null if it is left out or not valid. */
  function read() {
    return check(() => {
      definition?.check();
      if (fill.value === "none") return null;
      const shape = readShape();
      return { name: spec.name, datatype: spec.datatype, shape, ...readSource(shape) };
    });
  }

  function readSource(shape) {
    if (fill.value === "image") {
      const wrong = image.failure(shape);
      if (wrong) throw new InputError(wrong, image.file);
      return { bytes: toBase64(image.tensor(shape)) };
    }
    if (fill.value !== "values") return { fill: fill.value };
    const flat = parse().flat(Infinity);
    const elements = shape.reduce((product, size) => product * size, 1);
    if (flat.length !== elements) {
      const wanted = `${shapeText(shape)} takes ${plural(elements, "value")}`;
      throw new InputError(`${wanted}, not ${count(flat.length)}.`, values);
    }
    if (values.value.length > MOST_TEXT) {
      throw new InputError("This is too long to be sent from here.", values);
    }
    return valuesSource(flat, spec.datatype, values);
  }

  function check(work) {
    clearFailure();
    try {
      return work();
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      fail(error.message, error.field);
      return null;
    }
  }

  function fail(text, field = fill.value === "values" ? values : fill) {
    failed = field;
    setText(failure, text);
    setHidden(failure, false);
    setAttribute(field, "aria-invalid", "true");
    setAttribute(field, "aria-describedby", failure.id);
  }

  function clearFailure() {
    setHidden(failure, true);
    if (failed) setAttribute(failed, "aria-invalid", null);
    failed = null;
  }

  function hasFailed() {
    return failed !== null;
  }

  function focus() {
    (failed ?? definition?.field ?? fill).focus();
  }

  return self;
}

/** Create the fields of an input that no metadata describes. */
function createDefinition({ id, spec, onDefine }) {
  const name = el("input", { type: "text", id: `${id}-name`, autocomplete: "off" });
  const datatype = el("select", { id: `${id}-datatype` });
  const shape = el("input", { type: "text", id: `${id}-shape`, autocomplete: "off" });
  name.value = spec.name;
  setOptions(
    datatype,
    DATATYPES.map((each) => [each, each]),
  );
  shape.value = spec.shape.join(", ");
  for (const field of [name, datatype, shape]) {
    field.addEventListener("input", () => {
      const sizes = parsedShape(shape.value);
      if (sizes) onDefine({ name: name.value, datatype: datatype.value, shape: sizes });
    });
  }
  return {
    node: el(
      "div",
      { class: "fields" },
      labelled("Name", name),
      labelled("Datatype", datatype),
      labelled("Shape", shape),
    ),
    field: name,
    check() {
      if (!name.value) throw new InputError("An input needs a name.", name);
      if (!parsedShape(shape.value)) {
        throw new InputError("Write a shape as sizes with commas: 1, 3, 224, 224", shape);
      }
    },
  };
}

function parsedShape(text) {
  const parts = text.split(/[\s,x×[\]]+/).filter(Boolean);
  const sizes = parts.map(Number);
  const valid = sizes.every((size) => Number.isSafeInteger(size) && size >= -1);
  return valid && sizes.length <= MOST_RANK ? sizes : null;
}

/** Parse values as a list; integers of 64 bits that JSON would round become texts. */
export function parseValues(text, datatype) {
  let parsed = JSON.parse(text);
  if (datatype.endsWith("INT64")) parsed = JSON.parse(text.replace(LONG_INTEGER, '"$&"'));
  return Array.isArray(parsed) ? parsed : [parsed];
}

/** Return the sizes that values imply where a shape is free; null if they do not tell. */
export function sizesOf(values, shape) {
  const nested = [];
  for (let each = values; Array.isArray(each); [each] = each) nested.push(each.length);
  if (nested.length === shape.length) return nested;
  if (shape.filter((size) => size < 0).length !== 1) return null;
  const rest = shape.reduce((product, size) => (size < 0 ? product : product * size), 1);
  const free = values.flat(Infinity).length / rest;
  return Number.isInteger(free) ? shape.map((size) => (size < 0 ? free : size)) : null;
}

/** Return values for a request: as JSON, or as bytes if JSON would round them. */
function valuesSource(flat, datatype, field) {
  const exact = datatype.endsWith("INT64") && flat.some((value) => typeof value === "string");
  if (!exact) return { values: flat };
  try {
    return { bytes: toBase64(tensorBytes(flat, datatype)) };
  } catch (error) {
    throw new InputError(`These are not integers: ${error.message}`, field);
  }
}
