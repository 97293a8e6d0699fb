// The panel "Try it": sends a call to a model, and shows what client, gateway and server sent.

import { sendWithKey } from "./actions.js";
import { ApiError, postAction, readJson } from "./api.js";
import { fromBase64 } from "./bytes.js";
import {
  el,
  labelled,
  nameElement,
  setAttribute,
  setHidden,
  setName,
  setText,
  shortName,
} from "./dom.js";
import * as say from "./format.js";
import { createInputs } from "./try_inputs.js";
import { createSides } from "./try_messages.js";
import { createOutputs } from "./try_outputs.js";

const MOST_SUGGESTIONS = 50;
/** A model may take long. */
const SEND_TIMEOUT = 300000;

const FORMS = [
  ["json", "JSON"],
  ["binary", "Binary"],
  ["raw", "Raw"],
  ["v1", "V1"],
  ["grpc", "gRPC"],
];

const SETTINGS = `api_keys:
  operators: {file: operators.txt}   # one key on each line
admin:
  listen: HOST:PORT   # as now
  keys: operators
  payloads: true`;

export function createTryIt({ navigate, announce }) {
  const chooser = createChooser((model) => navigate("try", { model }));
  const inputs = createInputs({ onChange: () => forms.update(inputs.sent()) });
  const forms = createForms();
  const result = createResult(announce);
  const title = nameElement("", 80);
  const versions = el("datalist", { id: "try-versions" });
  const version = el("input", {
    type: "text",
    id: "try-version",
    autocomplete: "off",
    list: versions.id,
    placeholder: "the server's choice",
  });
  const headers = createHeaders();
  const note = el("p", { class: "summary", dir: "auto" });
  const failure = el("p", { class: "failure", role: "alert" });
  const send = el("button", { type: "submit", class: "primary" }, "Send");
  const fields = el(
    "div",
    {},
    inputs.node,
    el("div", { class: "filters" }, labelled("Version", version), versions, forms.node),
    headers.node,
    el("p", { class: "buttons" }, send),
    failure,
  );
  const form = el(
    "form",
    { "aria-labelledby": "try-title", novalidate: true, onsubmit: submitted },
    el("h2", { id: "try-title" }, "A call of ", title),
    note,
    fields,
  );
  const panel = el("div", {}, chooser.node, form, result.node);
  const refusal = createRefusal();
  const node = el("div", {}, refusal, panel);
  let model = null;
  let reading = 0;
  let sending = false;
  setHidden(refusal, true);
  setHidden(panel, true);
  setHidden(form, true);
  setHidden(failure, true);

  async function read() {
    const ticket = ++reading;
    setHidden(form, false);
    setHidden(fields, true);
    setHidden(failure, true);
    setName(title, model, 80);
    setHidden(note, false);
    setText(note, "The gateway asks a server for the model's inputs …");
    version.value = "";
    let found = { metadata: null };
    try {
      found = await readJson("model", { name: model });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      found.metadata_error = error.message;
    }
    if (ticket === reading) showMetadata(found);
  }

  function showMetadata({ metadata, metadata_error: error }) {
    const specs = Array.isArray(metadata?.inputs) ? metadata.inputs : null;
    const why = error ?? "no server said them";
    setText(note, specs ? "" : `The inputs are not known: ${why}. Add them by hand.`);
    setHidden(note, specs !== null);
    const known = Array.isArray(metadata?.versions) ? metadata.versions : [];
    const suggested = known.slice(0, MOST_SUGGESTIONS);
    versions.replaceChildren(...suggested.map((value) => el("option", { value })));
    inputs.show(specs);
    setHidden(fields, false);
  }

  async function submitted(event) {
    event.preventDefault();
    if (sending) return;
    setHidden(failure, true);
    const found = inputs.read();
    if (found === null) return;
    const call = {
      model,
      version: version.value.trim(),
      form: forms.chosen(),
      compare: forms.compares(),
      inputs: found,
      outputs: [], // all
      headers: headers.read(),
    };
    showSending(true);
    try {
      const document = await sendWithKey((key) => postAction("try", call, key, SEND_TIMEOUT));
      if (document) result.show(document, call);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      failed(error.message, call.model);
    } finally {
      showSending(false);
    }
  }

  function failed(text, asked) {
    if (asked === model && inputs.showError(text)) return;
    setText(failure, `Not sent: ${text}`);
    setHidden(failure, false);
  }

  // A button that is disabled would lose the focus.
  function showSending(isSending) {
    sending = isSending;
    setAttribute(send, "aria-disabled", sending ? "true" : null);
    setText(send, sending ? "Sending …" : "Send");
  }

  return {
    id: "try",
    title: "Try it",
    node,
    topics: () => ({}),
    show(next) {
      // Who comes back finds the model, and what was filled in.
      if (next.model === undefined && model !== null) {
        navigate("try", { model });
        return;
      }
      chooser.show(next.model ?? "");
      if (next.model === undefined || next.model === model) return;
      model = next.model;
      read();
    },
    hide: chooser.hide,
    update(topic, document) {
      if (topic !== "overview") return;
      setHidden(refusal, document.try_it);
      setHidden(panel, !document.try_it);
    },
  };
}

/** Create what is said if the gateway does not allow to send calls. */
function createRefusal() {
  return el(
    "section",
    { class: "wrong" },
    el("h2", {}, "Calls cannot be sent from here"),
    el(
      "p",
      {},
      "They show values of tensors, so the gateway allows them only with these settings, ",
      "and to who has one of these keys:",
    ),
    el("pre", { class: "body" }, SETTINGS),
  );
}

/** Create the field of a model's name, which suggests names as one types. */
function createChooser(choose) {
  const names = el("datalist", { id: "try-models" });
  const field = el("input", {
    type: "search",
    id: "try-model",
    autocomplete: "off",
    spellcheck: "false",
    list: names.id,
  });
  const failure = el("p", { class: "failure" });
  let typing = null;
  let reading = 0;
  let chosen = "";
  setHidden(failure, true);

  async function suggest() {
    const ticket = ++reading;
    const search = field.value.trim();
    try {
      const { models } = await readJson("models", { search, limit: MOST_SUGGESTIONS });
      if (ticket !== reading) return;
      setHidden(failure, true);
      names.replaceChildren(...models.map(({ name }) => el("option", { value: name })));
      // A name that was chosen from the list needs no further key.
      if (models.some(({ name }) => name === search)) accept();
    } catch (error) {
      if (ticket !== reading || !(error instanceof ApiError)) return;
      setText(failure, `The models cannot be read: ${error.message}`);
      setHidden(failure, false);
    }
  }

  function accept() {
    clearTimeout(typing);
    const wanted = field.value.trim();
    if (wanted && wanted !== chosen) choose(wanted);
  }

  field.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(suggest, 250);
  });
  field.addEventListener("change", accept);
  return {
    node: el(
      "form",
      {
        class: "filters",
        role: "search",
        "aria-label": "Model",
        onsubmit: (event) => {
          event.preventDefault();
          accept();
        },
      },
      labelled("Model", field),
      names,
      el("button", { type: "submit" }, "Choose"),
      failure,
    ),
    show(model) {
      chosen = model;
      if (document.activeElement !== field) field.value = model;
      suggest();
    },
    hide() {
      reading += 1;
      clearTimeout(typing);
    },
  };
}

/** Create the choice of the form in which a call is sent. */
function createForms() {
  const fields = new Map(
    FORMS.map(([value]) => [
      value,
      el("input", { type: "radio", name: "try-form", id: `try-form-${value}`, value }),
    ]),
  );
  const note = el("span", { class: "muted" });
  const compare = el("input", { type: "checkbox", id: "try-compare" });
  const chosen = () => [...fields.values()].find((field) => field.checked).value;
  fields.get("json").checked = true;
  return {
    node: el(
      "fieldset",
      { class: "forms", onchange: () => (compare.disabled = chosen() !== "json") },
      el("legend", {}, "Send as"),
      ...FORMS.map(([value, text]) => el("label", { class: "field" }, fields.get(value), text)),
      note,
      el(
        "label",
        { class: "field", title: "Send it three more times each, with conversion and without" },
        compare,
        "Compare JSON with and without conversion",
      ),
    ),
    chosen,
    compares: () => compare.checked && chosen() === "json",
    /** Offer the forms that these inputs allow. */
    update(inputs) {
      const wrong = rawProblem(inputs);
      const raw = fields.get("raw");
      raw.disabled = Boolean(wrong);
      if (wrong && raw.checked) fields.get("json").checked = true;
      setText(note, wrong);
    },
  };
}

/** Create the field of further headers, such as the key of a client. */
function createHeaders() {
  const field = el("textarea", {
    id: "try-headers",
    rows: 2,
    spellcheck: "false",
    autocomplete: "off",
    placeholder: "Authorization: Bearer …",
  });
  return {
    node: el(
      "details",
      {},
      el("summary", {}, "Further headers, such as a client's API key"),
      labelled("Headers, one on each line", field),
    ),
    read() {
      const lines = field.value.split("\n").filter((line) => line.trim());
      const pairs = lines.map((line) => {
        const [name, ...rest] = line.split(":");
        return [name.trim(), rest.join(":").trim()];
      });
      return Object.fromEntries(pairs);
    },
  };
}

/** Return why inputs cannot be sent as raw bytes, without names and shapes; empty if they can. */
function rawProblem(inputs) {
  if (inputs.length !== 1) return "Raw takes one input.";
  const free = inputs[0].shape.filter((size) => size < 0).length;
  return free > 1 ? "Raw takes at most one free dimension." : "";
}

/** Create the place of a call's result. */
function createResult(announce) {
  const node = el("section", { class: "result", "aria-labelledby": "try-result" });
  setHidden(node, true);
  return {
    node,
    show(document, call) {
      const { status, error, outputs, duration_ms: duration } = document;
      const level = say.callFailed({ status }) ? "error" : "ok";
      const statusText = say.callStatus(status);
      const query = new URLSearchParams({ request_id: document.request_id });
      const summary = el(
        "p",
        { class: "summary" },
        el("strong", { class: "state", "data-level": level }, statusText),
        ` after ${say.milliseconds(duration)}, as ${say.formName(call.form)} · `,
        el("a", { href: `#calls?${query}` }, "This call in the panel Calls"),
      );
      node.replaceChildren(
        el("h2", { id: "try-result" }, "Result of ", nameElement(call.model, 80)),
        summary,
        error ? el("p", { class: "failure", dir: "auto" }, error) : "",
        call.compare && !error ? el("p", {}, comparisonText(document.comparison)) : "",
        createOutputs(outputs),
        createCopies(document, announce),
        createSides(document),
      );
      setHidden(node, false);
      summary.scrollIntoView({ block: "nearest" });
      const said = error ? error.slice(0, 300) : say.plural(outputs.length, "output");
      announce(
        `${shortName(call.model, 60)}: ${statusText} after ${say.milliseconds(duration)}: ${said}`,
      );
    },
  };
}

function comparisonText(comparison) {
  if (!comparison) return "No server takes this call without conversion.";
  const { converted_ms: converted, untouched_ms: untouched } = comparison;
  const [ratio, word] =
    untouched >= converted ? [untouched / converted, "sooner"] : [converted / untouched, "later"];
  return (
    `With conversion ${say.milliseconds(converted)}, without ${say.milliseconds(untouched)}: ` +
    `${say.number(ratio)} × ${word}. Medians of three calls each.`
  );
}

/** Create the buttons that copy a call as text, and save its body. */
function createCopies({ curl, python, client, files }, announce) {
  const field = el("textarea", { id: "try-copy", rows: 8, readonly: true, spellcheck: "false" });
  const fallback = labelled("Copy this text", field);
  setHidden(fallback, true);

  async function copy(text, name) {
    try {
      await navigator.clipboard.writeText(text);
      setHidden(fallback, true);
      announce(`Copied as ${name}.`);
    } catch {
      // Without HTTPS, browsers have no clipboard.
      field.value = text;
      setHidden(fallback, false);
      field.focus();
      field.select();
    }
  }

  const button = (text, name) =>
    el("button", { type: "button", onclick: () => copy(text, name) }, `Copy as ${name}`);
  return el(
    "div",
    {},
    el(
      "p",
      { class: "buttons" },
      button(curl, "curl"),
      button(python, "tritonclient code"),
      curl.includes("body.bin") ? createSaveOfBody(client.request) : null,
      ...Object.entries(files).map(([name, body]) => createSave(name, body)),
    ),
    fallback,
  );
}

function createSaveOfBody({ body, size }) {
  const padding = body.endsWith("==") ? 2 : Number(body.endsWith("="));
  if ((body.length / 4) * 3 - padding < size) {
    const text = `The body of ${say.bytes(size)} is too large to be saved here.`;
    return el("span", { class: "muted" }, text);
  }
  return createSave("body.bin", body);
}

function createSave(name, body) {
  const onclick = () => save(fromBase64(body), name);
  return el("button", { type: "button", onclick }, `Save ${name}`);
}

function save(bytes, name) {
  const url = URL.createObjectURL(new Blob([bytes], { type: "application/octet-stream" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}
