// Both sides of a call: what client, gateway and server sent each other, with the bytes of each body.

import { fromBase64, hexDump } from "./bytes.js";
import { el, nameElement } from "./dom.js";
import * as say from "./format.js";

const MOST_HEADERS = 60;
const MOST_HEADER = 400;
const MOST_TEXT = 6000;
const MOST_DUMP = 256;
/** Elements of a list, characters of a text, and levels of JSON that are printed. */
const MOST_ELEMENTS = 24;
const MOST_CHARACTERS = 200;
const MOST_LEVELS = 16;
/** Characters of an object or a list that stays on one line. */
const SHORT_LINE = 64;
/** An integer that JSON.parse would round. */
const LONG_INTEGER = /(?<![\d.])\d{16,}(?![\d.eE])/;
const MOST_ATTEMPTS = 10;

/** Create both sides in columns, under a sentence that sums them up. */
export function createSides({ client, attempts }) {
  const shown = attempts.slice(-MOST_ATTEMPTS);
  const first = attempts.length - shown.length;
  return el(
    "section",
    {},
    el("h2", {}, "Both sides"),
    el("p", { class: "summary", dir: "auto" }, summary(client, attempts)),
    el(
      "div",
      { class: "columns" },
      el(
        "section",
        {},
        el("h3", {}, "Client and gateway"),
        createMessage("Request", "client's request", client.request),
        createMessage("Response", "response to the client", client.response),
      ),
      el(
        "section",
        {},
        el("h3", {}, "Gateway and server"),
        ...shown.map((attempt, index) =>
          createAttempt(attempt, first + index + 1, attempts.length),
        ),
        attempts.length ? null : el("p", { class: "muted" }, "The gateway sent nothing."),
      ),
    ),
  );
}

function createAttempt({ upstream, endpoint, request, response, error }, number, total) {
  const which = total > 1 ? `attempt ${number}` : "";
  const suffix = which && ` of ${which}`;
  return el(
    "div",
    { class: "attempt" },
    el(
      "p",
      { class: "muted" },
      which && `Attempt ${number} of ${total}: `,
      nameElement(endpoint, 80),
      " of ",
      nameElement(upstream),
    ),
    createMessage("Request", `request to the server${suffix}`, request),
    error ? el("p", { class: "failure", dir: "auto" }, error) : null,
    response ? createMessage("Response", `server's response${suffix}`, response) : null,
  );
}

/** Sum up: "The client sent 3.1 MB of JSON; the server got 602 kB of binary." */
export function summary(client, attempts) {
  const last = attempts.at(-1);
  const sent = `The client sent ${bodyName(client.request)}`;
  const got = `the client got ${bodyName(client.response)}`;
  if (!last) return `${sent}; no server got anything. From the gateway, ${got}.`;
  const tried = attempts.length > 1 ? ` at attempt ${attempts.length}` : "";
  const returned = last.response
    ? `The server returned ${bodyName(last.response)}`
    : "The server returned nothing";
  return `${sent}; the server got ${bodyName(last.request)}${tried}. ${returned}; ${got}.`;
}

function bodyName(message) {
  if (!message) return "nothing";
  return message.size ? `${say.bytes(message.size)} of ${bodyKind(message)}` : "no body";
}

function bodyKind(message) {
  if (message.json_size) return "binary";
  const type = headerOf(message, "content-type");
  if (/^application\/grpc/.test(type)) return "gRPC";
  if (isJson(message)) return "JSON";
  if (/^text\//.test(type)) return "text";
  return type === "application/octet-stream" ? "raw bytes" : "bytes";
}

function headerOf({ headers }, wanted) {
  const found = headers.find(([name]) => name.toLowerCase() === wanted);
  return found ? found[1].toLowerCase().trim() : "";
}

function isJson(message) {
  return /^[^;]*\bjson\b/.test(headerOf(message, "content-type"));
}

function isText(message) {
  const encoding = headerOf(message, "content-encoding");
  if (encoding && encoding !== "identity") return false;
  return isJson(message) || /^text\//.test(headerOf(message, "content-type"));
}

function createMessage(title, name, message) {
  if (!message) return null;
  const headers = [...message.headers, ...(message.trailers ?? [])];
  const lines = headers.slice(0, MOST_HEADERS).map(([key, value]) => `${key}: ${value}`);
  if (headers.length > MOST_HEADERS) {
    lines.push(`… ${say.plural(headers.length - MOST_HEADERS, "more header")}`);
  }
  const head = [message.start, ...lines].map((line) => cut(line, MOST_HEADER)).join("\n");
  return el(
    "div",
    {},
    el("h4", {}, title, " ", el("span", { class: "muted" }, sizeText(message))),
    el("pre", { class: "head", dir: "ltr" }, head),
    ...createBody(name, message),
  );
}

/** Say the size of a body and of its parts: "602 kB of binary: JSON 128 B, tensors 602 kB". */
function sizeText(message) {
  const { size, json_size: json } = message;
  if (!json) return bodyName(message);
  return `${bodyName(message)}: JSON ${say.bytes(json)}, tensors ${say.bytes(size - json)}`;
}

function createBody(name, message) {
  if (!message.size) return [];
  const bytes = fromBase64(message.body);
  const textSize = message.json_size || (isText(message) ? message.size : 0);
  const parts = [];
  if (textSize) parts.push(createText(name, bytes.subarray(0, textSize), textSize));
  if (textSize < message.size) {
    parts.push(createDump(name, bytes.subarray(textSize), message.size - textSize));
  }
  return parts;
}

function createText(name, bytes, size) {
  const text = new TextDecoder().decode(bytes);
  const shown = cut(bytes.length === size ? formatted(text) : text, MOST_TEXT);
  const unknown = size - bytes.length;
  return createRegion(
    `Text of the ${name}`,
    unknown > 0 ? `${shown}\n… ${say.bytes(unknown)} more` : shown,
  );
}

/** Return JSON in lines; other text, and JSON with long integers, as it is. */
function formatted(text) {
  if (LONG_INTEGER.test(text)) return text;
  try {
    return prettyJson(JSON.parse(text));
  } catch {
    return text;
  }
}

function createDump(name, bytes, size) {
  const shown = bytes.subarray(0, MOST_DUMP);
  const left = size - shown.length;
  const rest = left > 0 ? `\n… ${say.plural(left, "more byte")}` : "";
  return createRegion(`Bytes of the ${name}`, hexDump(shown) + rest, "dump");
}

function createRegion(label, text, kind = "text") {
  return el(
    "pre",
    { class: `body ${kind}`, tabindex: "0", role: "region", "aria-label": label, dir: "ltr" },
    text,
  );
}

function cut(text, most) {
  const left = text.length - most;
  return left > 0 ? `${text.slice(0, most)} … ${say.plural(left, "more character")}` : text;
}

/** Print JSON with a line for each member; of long lists and texts, the begin with what is left. */
export function prettyJson(value, indent = "") {
  if (indent.length > 2 * MOST_LEVELS) return cut(JSON.stringify(value), MOST_CHARACTERS);
  if (Array.isArray(value)) return prettyList(value, indent);
  if (value !== null && typeof value === "object") {
    return prettyMembers(Object.entries(value), indent, "{}", ([key, each], inner) => {
      return `${JSON.stringify(key)}: ${prettyJson(each, inner)}`;
    });
  }
  return cut(JSON.stringify(value), MOST_CHARACTERS);
}

function prettyList(list, indent) {
  if (list.some((each) => each !== null && typeof each === "object")) {
    return prettyMembers(list, indent, "[]", prettyJson);
  }
  const shown = list.slice(0, MOST_ELEMENTS).map((each) => prettyJson(each));
  if (list.length > shown.length) shown.push(`… ${say.count(list.length - shown.length)} more`);
  return `[${shown.join(", ")}]`;
}

function prettyMembers(members, indent, [open, close], print) {
  const inner = `${indent}  `;
  const parts = members.slice(0, MOST_ELEMENTS).map((each) => print(each, inner));
  if (members.length > parts.length) {
    parts.push(`… ${say.count(members.length - parts.length)} more`);
  }
  const line = parts.join(", ");
  if (line.length <= SHORT_LINE && !line.includes("\n")) return open + line + close;
  return `${open}\n${parts.map((part) => inner + part).join(",\n")}\n${indent}${close}`;
}
