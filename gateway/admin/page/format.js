// Says numbers, times and codes in words and units. What is not known is a dash.

export const UNKNOWN = "–";

const formats = [0, 1, 2, 3].map(
  (digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }),
);

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Return a number with about three digits. */
export function number(value) {
  if (!known(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 99.95) return formats[0].format(value);
  if (size >= 9.995) return formats[1].format(value);
  if (size >= 0.9995) return formats[2].format(value);
  if (size >= 0.0005) return formats[3].format(value);
  return value === 0 ? "0" : "< 0.001";
}

/** Return a number of a tensor, which may be tiny, with six digits. */
export function precise(value) {
  return known(value) ? String(Number(value.toPrecision(6))) : UNKNOWN;
}

export function count(value) {
  return known(value) ? formats[0].format(value) : UNKNOWN;
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function rate(value) {
  return known(value) ? `${number(value)}/s` : UNKNOWN;
}

export function percent(ratio) {
  if (!known(ratio)) return UNKNOWN;
  const value = 100 * ratio;
  if (value > 0 && value < 0.01) return "< 0.01 %";
  if (value > 99.99 && value < 100) return "> 99.99 %";
  return `${value < 1 ? formats[2].format(value) : number(value)} %`;
}

export function milliseconds(value) {
  if (!known(value)) return UNKNOWN;
  return value < 999.5 ? `${number(value)} ms` : seconds(value / 1000);
}

export function seconds(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 1) return value === 0 ? "0 s" : `${number(1000 * value)} ms`;
  if (value < 59.95) return `${number(value)} s`;
  const whole = Math.round(value);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

/** Say of how many seconds percentiles are: a young gateway has less than a minute. */
export function lastSeconds(value) {
  return value < 60 && known(value) ? `last ${count(value)} s` : "last minute";
}

const BYTE_UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];

export function bytes(value) {
  if (!known(value)) return UNKNOWN;
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 999.5 && unit < BYTE_UNITS.length - 1) {
    size /= 1000;
    unit += 1;
  }
  const digits = unit === 0 ? count(Math.round(size)) : number(size);
  return `${value < 0 ? "−" : ""}${digits} ${BYTE_UNITS[unit]}`;
}

export function byteRate(value) {
  return known(value) ? `${bytes(value)}/s` : UNKNOWN;
}

/** Return the seconds since 1970 of a time, which may be text of ISO 8601. */
export function unixTime(value) {
  if (known(value)) return value;
  const parsed = typeof value === "string" ? Date.parse(value) / 1000 : NaN;
  return Number.isFinite(parsed) ? parsed : null;
}

/** Return the local time of day; with the date if that was another day. */
export function clock(time, withMilliseconds = false) {
  const at = unixTime(time);
  if (at === null) return UNKNOWN;
  const date = new Date(1000 * at);
  const two = (value) => String(value).padStart(2, "0");
  let text = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  if (withMilliseconds) text += `.${String(date.getMilliseconds()).padStart(3, "0")}`;
  if (date.toDateString() === new Date().toDateString()) return text;
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${text}`;
}

export function ago(time, now) {
  const at = unixTime(time);
  if (at === null) return UNKNOWN;
  const passed = Math.max(0, now - at);
  return passed < 1 ? "now" : `${seconds(Math.round(passed))} ago`;
}

const HTTP_STATUSES = {
  0: "aborted",
  200: "OK",
  201: "Created",
  202: "Accepted",
  204: "No content",
  304: "Not modified",
  400: "Bad request",
  401: "Not authenticated",
  403: "Forbidden",
  404: "Not found",
  405: "Method not allowed",
  406: "Not acceptable",
  408: "Client too slow",
  409: "Conflict",
  411: "Length required",
  412: "Precondition failed",
  413: "Too large",
  414: "URL too long",
  415: "Unsupported media type",
  417: "Expectation failed",
  421: "Wrong host",
  422: "Not processable",
  429: "Too many requests",
  431: "Header too large",
  499: "Client left",
  500: "Server error",
  501: "Not implemented",
  502: "Bad gateway",
  503: "Unavailable",
  504: "Timeout",
  507: "No memory",
};

const GRPC_STATUSES = [
  "OK",
  "cancelled",
  "unknown",
  "invalid argument",
  "deadline exceeded",
  "not found",
  "already exists",
  "permission denied",
  "resource exhausted",
  "failed precondition",
  "aborted",
  "out of range",
  "unimplemented",
  "internal",
  "unavailable",
  "data loss",
  "unauthenticated",
];

/** Say how a call ended: "503 Unavailable", "200 OK, gRPC 14 unavailable". */
export function callStatus(status, grpcStatus) {
  const word = HTTP_STATUSES[status] ?? "";
  const http = status === 0 ? word : `${status} ${word}`.trim();
  if (!known(grpcStatus)) return http;
  const grpc = `gRPC ${grpcStatus} ${GRPC_STATUSES[grpcStatus] ?? ""}`.trim();
  return status === 200 ? grpc : `${http}, ${grpc}`;
}

export function callFailed(call) {
  const grpc = known(call.grpc_status) && call.grpc_status !== 0;
  return call.status === 0 || call.status >= 400 || grpc;
}

const FORMS = {
  json: "JSON",
  binary: "binary",
  raw: "raw bytes",
  v1: "V1 JSON",
  grpc: "gRPC",
  "": "as sent",
};

export function formName(form) {
  return FORMS[form] ?? String(form);
}

const FAILURES = {
  "5xx": "returned 5xx",
  aborted: "aborted",
  bad_response: "invalid response",
  no_response: "closed without a response",
  overloaded: "overloaded",
  server_timeout: "timeout",
  unreachable: "unreachable",
};

export function failureName(kind) {
  return FAILURES[kind] ?? String(kind).replaceAll("_", " ");
}

/** Say rates by name: "2xx 10.1/s, 4xx 0.1/s". Zeros are left out. */
export function ratesByName(rates, nameOf = String) {
  const parts = Object.entries(rates ?? {})
    .filter(([, value]) => value > 0)
    .map(([name, value]) => [nameOf(name), rate(value)])
    // A line does not break after a short name.
    .map(([name, text]) => (name.length < 8 ? `${name}\u00a0${text}` : `${name} ${text}`));
  return parts.join(", ") || UNKNOWN;
}

export function countsByName(counts, nameOf = String) {
  const parts = Object.entries(counts ?? {})
    .filter(([, value]) => value > 0)
    .map(([name, value]) => `${count(value)} ${nameOf(name)}`);
  return parts.join(", ");
}

/** Say a shape: "any × 3 × 224". */
export function shapeText(shape) {
  if (!Array.isArray(shape)) return UNKNOWN;
  if (!shape.length) return "scalar";
  return shape
    .slice(0, 16)
    .map((size) => (Number(size) < 0 ? "any" : String(size)))
    .join(" × ");
}
