// The panel "Calls": the last calls with filters; each opens to its timeline. "Follow" shows new ones live.

import { ApiError, readJson } from "./api.js";
import {
  addressElement,
  dataRow,
  dataTable,
  el,
  factTable,
  keyedList,
  labelled,
  nameElement,
  setAddress,
  setAttribute,
  setHidden,
  setName,
  setOptions,
  setText,
  svg,
} from "./dom.js";
import * as say from "./format.js";
import { modelLink } from "./topology.js";

const MOST = 200;
/** The rows at first, and those that are added at the end of the list: a flood of calls stays cheap. */
const ROWS = 60;

const COLUMNS = [
  { label: "Ended at" },
  { label: "Status" },
  { label: "Model" },
  { label: "Duration", numeric: true },
  { label: "Timeline" },
  { label: "Forms" },
  { label: "Endpoint" },
  { label: "Error" },
];

const PHASE_COLUMNS = [
  { label: "Phase" },
  { label: "Begins after", numeric: true },
  { label: "Takes", numeric: true },
  { label: "Picture" },
];

const ATTEMPT_COLUMNS = [
  { label: "Other attempt at" },
  { label: "First byte", numeric: true },
  { label: "Duration", numeric: true },
  { label: "Sent", numeric: true },
  { label: "Received", numeric: true },
];

const STATUSES = [
  ["", "any status"],
  ["2xx", "2xx, success"],
  ["4xx", "4xx, the client's error"],
  ["5xx", "5xx, the server's error"],
  ["aborted", "aborted"],
];

const TEXT_FILTERS = [
  ["model", "Model is"],
  ["upstream", "Upstream is"],
  ["endpoint", "Endpoint is"],
  ["route", "Route is"],
  ["request_id", "Request id is"],
  ["search", "Any text has"],
];

export function createCalls({ navigate, refollow, announce }) {
  const fields = new Map(
    TEXT_FILTERS.map(([name]) => [
      name,
      el("input", {
        type: "search",
        id: `calls-${name}`,
        autocomplete: "off",
        spellcheck: "false",
      }),
    ]),
  );
  const status = el("select", { id: "calls-status" });
  setOptions(status, STATUSES);
  const slow = el("input", {
    type: "number",
    id: "calls-min_ms",
    min: "0",
    step: "any",
    inputmode: "decimal",
  });
  const errors = el("input", { type: "checkbox", id: "calls-errors" });
  const clear = el(
    "button",
    { type: "button", onclick: () => navigate("calls", {}) },
    "Clear the filters",
  );
  const follow = el("button", { type: "button", class: "primary", "aria-pressed": "true" });
  const note = el("p", { class: "muted summary" });
  const failure = el("p", { class: "failure" });
  const nothing = el("p", { class: "empty" });
  const table = dataTable("Calls, newest first", COLUMNS, { class: "calls wide" });
  const open = new Set();
  let calls = [];
  let parameters = {};
  let following = true;
  let reading = 0;
  let skipped = 0;
  let rateText = "";
  setHidden(failure, true);
  setHidden(nothing, true);

  const render = keyedList(
    table.body,
    (call) => call.id,
    () => createCall(open, () => following && setFollowing(false)),
  );
  let rows = ROWS;
  const moreRows = el("button", { type: "button", onclick: () => showMoreRows() }, "Show more");
  new IntersectionObserver(([entry]) => entry.isIntersecting && showMoreRows()).observe(moreRows);

  function showMoreRows() {
    if (rows >= calls.length) return;
    rows += ROWS;
    show();
  }

  let typing = null;
  const changed = () => {
    clearTimeout(typing);
    typing = setTimeout(() => navigate("calls", readFilters()), 300);
  };
  for (const field of [...fields.values(), slow]) field.addEventListener("input", changed);
  for (const field of [status, errors]) field.addEventListener("change", changed);

  follow.addEventListener("click", () => setFollowing(!following));

  // A call that somebody reads must not move, so opening one pauses too.
  function setFollowing(wanted) {
    following = wanted;
    showFollowing();
    announce(following ? "New calls are shown as they end." : "Paused: the list stands still.");
    if (following) read();
    refollow();
  }

  function showFollowing() {
    setAttribute(follow, "aria-pressed", String(following));
    setText(follow, following ? "Following: pause" : "Paused: follow");
  }

  function readFilters() {
    const found = {};
    for (const [name, field] of fields) if (field.value.trim()) found[name] = field.value.trim();
    if (status.value) found.status = status.value;
    if (Number(slow.value) > 0) found.min_ms = slow.value;
    if (errors.checked) found.errors = "1";
    return found;
  }

  function showFilters() {
    const set = (field, value) => {
      if (document.activeElement !== field) field.value = value;
    };
    for (const [name, field] of fields) set(field, parameters[name] ?? "");
    status.value = parameters.status ?? "";
    set(slow, parameters.min_ms ?? "");
    errors.checked = Boolean(parameters.errors);
    // A filter in use must be seen.
    if (others.some(([name]) => parameters[name])) moreFilters.open = true;
    setHidden(clear, Object.keys(parameters).length === 0);
  }

  async function read() {
    const ticket = ++reading;
    try {
      const document = await readJson("calls", { ...parameters, limit: MOST });
      if (ticket !== reading) return;
      setHidden(failure, true);
      // Events may have brought newer ones meanwhile.
      const newest = document.calls[0]?.time ?? 0;
      const newer = following ? calls.filter((call) => call.time > newest) : [];
      const ids = new Set(document.calls.map((call) => call.id));
      calls = keepOpen([
        ...newer.filter((call) => !ids.has(call.id)),
        ...document.calls.map(complete),
      ]);
      skipped = 0;
      rateText = "";
      show();
    } catch (error) {
      if (ticket !== reading || !(error instanceof ApiError)) return;
      setText(failure, `The calls cannot be read: ${error.message}`);
      setHidden(failure, false);
    }
  }

  // Workers tell of their calls one after the other, so that a call may come behind newer ones.
  // A call that is open stays in the list, even if newer ones push it out.
  function keepOpen(next) {
    const newest = newestFirst(next).slice(0, MOST);
    const ids = new Set(newest.map((call) => call.id));
    return [...newest, ...calls.filter((call) => open.has(call.id) && !ids.has(call.id))];
  }

  function update(document) {
    const ids = new Set(calls.map((call) => call.id));
    const fresh = document.calls.filter((call) => !ids.has(call.id)).map(complete);
    skipped += Math.max(0, fresh.length - MOST);
    calls = keepOpen([...fresh, ...calls]);
    setHidden(failure, true);
    rateText = fresh.length ? `, ${say.count(fresh.length)} new` : "";
    show();
  }

  function show() {
    const shown = calls.filter((call, index) => index < rows || open.has(call.id));
    render(shown);
    setHidden(moreRows, shown.length >= calls.length);
    setHidden(table.node, calls.length === 0);
    setHidden(nothing, calls.length > 0);
    const filtered = Object.keys(parameters).length > 0;
    setText(
      nothing,
      filtered ? "No call of those that are kept matches these filters." : "No call has ended yet.",
    );
    const left = skipped ? ` ${say.count(skipped)} came too fast to be shown.` : "";
    setText(
      note,
      `${say.plural(calls.length, "call")}${calls.length >= MOST ? ", the newest" : ""}${rateText}. ` +
        `Of very many calls, the gateway keeps those that failed or took longest, and some others.${left}`,
    );
  }

  const others = TEXT_FILTERS.filter(([name]) => name !== "model");
  const moreFilters = el(
    "details",
    { class: "more-filters" },
    el("summary", {}, "More filters"),
    el(
      "div",
      { class: "fields" },
      ...others.map(([name, label]) => labelled(label, fields.get(name))),
    ),
  );
  const node = el(
    "div",
    {},
    el(
      "form",
      {
        class: "filters",
        role: "search",
        "aria-label": "Calls",
        onsubmit: (event) => {
          event.preventDefault();
          clearTimeout(typing);
          navigate("calls", readFilters());
        },
      },
      follow,
      labelled("Status", status),
      labelled("Slower than (ms)", slow),
      labelled("Only errors", errors),
      labelled("Model is", fields.get("model")),
      moreFilters,
      clear,
    ),
    failure,
    note,
    nothing,
    table.node,
    moreRows,
  );
  showFollowing();

  return {
    id: "calls",
    title: "Calls",
    node,
    topics: () => (following ? { calls: { ...parameters, limit: MOST } } : {}),
    show(next) {
      if (JSON.stringify(next) !== JSON.stringify(parameters)) {
        calls = [];
        rows = ROWS;
        open.clear();
      }
      parameters = next;
      showFilters();
      read();
    },
    hide() {
      reading += 1;
      clearTimeout(typing);
    },
    /** Read what was missed while there was no stream. */
    reconnected() {
      if (following) read();
    },
    update: (topic, document) => topic === "calls" && following && update(document),
  };
}

export function newestFirst(calls) {
  return [...calls].sort((a, b) => b.time - a.time);
}

/** Complete a call: the gateway leaves out fields that have no value. */
function complete(call) {
  return {
    ...call,
    model: call.model ?? "",
    version: call.version ?? "",
    endpoint: call.endpoint ?? "",
    upstream: call.upstream ?? "",
    client_form: call.client_form ?? "",
    server_form: call.server_form ?? "",
    reason: call.reason ?? "",
  };
}

function createCall(open, onOpen) {
  const toggle = el("button", { type: "button", class: "toggle" });
  const operation = el("span", { class: "muted line" });
  const status = el("strong", { class: "state" });
  const model = nameElement("", 40);
  const version = el("span", { class: "muted line" });
  const [duration, forms, error] = [
    el("span"),
    el("span"),
    el("span", { dir: "auto", class: "clamp" }),
  ];
  const endpoint = addressElement();
  const upstream = el("span", { class: "muted line" });
  const bar = el("span");
  const row = dataRow(COLUMNS, [
    [toggle, operation],
    status,
    [model, version],
    duration,
    bar,
    forms,
    [endpoint, upstream],
    error,
  ]);
  const entry = { nodes: [row], update };
  let shown = null;
  toggle.addEventListener("click", () => {
    if (open.has(shown.id)) open.delete(shown.id);
    else {
      open.add(shown.id);
      onOpen();
    }
    showMore();
  });

  function showMore() {
    const isOpen = open.has(shown.id);
    setAttribute(toggle, "aria-expanded", String(isOpen));
    if (isOpen === entry.nodes.length > 1) return;
    if (isOpen) {
      const cell = el("td", { role: "cell", colspan: COLUMNS.length }, callDetails(shown));
      const more = el("tr", { role: "row", class: "more" }, cell);
      row.after(more);
      entry.nodes = [row, more];
    } else entry.nodes.pop().remove();
  }

  function update(call) {
    // A call that has ended does not change.
    if (shown) return;
    shown = call;
    setText(toggle, say.clock(call.time, true));
    setAttribute(
      toggle,
      "aria-label",
      `Details of the call that ended at ${say.clock(call.time, true)}`,
    );
    setText(operation, call.operation || call.method);
    setText(status, say.callStatus(call.status, call.grpc_status));
    const level = say.callFailed(call) ? "error" : "ok";
    setAttribute(status, "data-level", level);
    setAttribute(row, "data-level", level === "ok" ? null : level);
    setName(model, call.model || "no model", 40);
    setText(version, call.version ? `version ${call.version.slice(0, 40)}` : "");
    setText(duration, say.milliseconds(call.duration_ms));
    bar.replaceChildren(timelineBar(call));
    setText(forms, formsText(call));
    setAddress(endpoint, call.endpoint || "none", 40);
    const tried = call.attempts > 1 ? `${call.attempts} attempts` : "";
    setText(upstream, [call.upstream?.slice(0, 40), tried].filter(Boolean).join(", "));
    setText(error, call.reason);
    showMore();
  }

  return entry;
}

function formsText({ client_form: client, server_form: server }) {
  if (!client && !server) return "none";
  if (!server || client === server) return say.formName(client);
  return `${say.formName(client)} → ${say.formName(server)}`;
}

/** Create one bar with a piece for each phase; its text alternative names them. */
function timelineBar({ timeline, duration_ms: duration }) {
  const whole = duration || 1;
  const text = timeline
    .map((phase) => `${phase.label} ${say.milliseconds(phase.duration_ms)}`)
    .join(", ");
  return svg(
    "svg",
    {
      viewBox: "0 0 100 10",
      preserveAspectRatio: "none",
      class: "timeline",
      role: "img",
      "aria-label": text || "no timeline",
    },
    svg("title", {}, text || "no timeline"),
    ...timeline.map((phase) => phaseBox(phase, whole)),
  );
}

function phaseBox({ name, start_ms: start, duration_ms: takes }, whole) {
  const x = Math.min(100, (100 * start) / whole);
  return svg("rect", {
    class: "phase",
    "data-phase": name,
    x: x.toFixed(2),
    y: 1,
    width: Math.max(0.6, Math.min(100 - x, (100 * takes) / whole)).toFixed(2),
    height: 8,
  });
}

function callDetails(call) {
  const facts = factTable("The call");
  const rows = [];
  if (call.reason) {
    rows.push(["Error", el("span", { dir: "auto", class: "failure" }, call.reason)]);
  }
  if (call.error_kind) rows.push(["Kind of error", say.failureName(call.error_kind)]);
  if (call.answered_by) rows.push(["Answered by", `the ${call.answered_by}`]);
  rows.push(
    ["Request id", code(call.request_id)],
    ["Trace id", code(call.trace_id)],
    ["Request", el("span", {}, `${call.method} `, nameElement(call.target ?? "", 160))],
    [
      "Model",
      call.model
        ? el(
            "span",
            {},
            el("a", { href: modelLink(call.model) }, nameElement(call.model, 80)),
            call.version ? ` version ${call.version.slice(0, 40)}` : "",
          )
        : "none",
    ],
    ["Client", call.client || "none: it came over a Unix socket"],
    [
      "Route",
      call.route === null || call.route === undefined || call.route === ""
        ? "none matched"
        : String(call.route),
    ],
    [
      "Server",
      call.endpoint
        ? el(
            "span",
            {},
            el(
              "a",
              {
                href: `#topology?${new URLSearchParams({ upstream: call.upstream, search: call.endpoint })}`,
              },
              nameElement(call.endpoint, 80),
            ),
            " of ",
            nameElement(call.upstream),
          )
        : "none was asked",
    ],
    ["Attempts", attemptsText(call)],
    ["Forms", formsText(call)],
    [
      "Request size",
      `${say.bytes(call.request_bytes)} from the client, ${say.bytes(call.sent_bytes)} to the server`,
    ],
    [
      "Response size",
      `${say.bytes(call.received_bytes)} from the server, ${say.bytes(call.response_bytes)} to the client`,
    ],
    [
      "Elements",
      `${say.count(call.request_elements)} in the request, ${say.count(call.response_elements)} in the response`,
    ],
    ["Call", call.id],
  );
  facts.show(rows);
  const parts = [timelineTable(call), facts.node];
  if (call.other_attempts.length) parts.push(attemptTable(call.other_attempts));
  return el("div", { class: "details" }, ...parts);
}

function code(text) {
  return text ? el("code", {}, nameElement(text, 80)) : "none";
}

function attemptsText({ attempts, retries, endpoint }) {
  if (!attempts) return endpoint ? "1" : "none";
  return retries
    ? `${say.count(attempts)}, of which ${say.plural(retries, "retry", "retries")}`
    : say.count(attempts);
}

function timelineTable({ timeline, duration_ms: duration }) {
  const table = dataTable(`Timeline: ${say.milliseconds(duration)} in all`, PHASE_COLUMNS, {
    class: "visible-caption phases",
  });
  for (const phase of timeline) {
    const picture = svg(
      "svg",
      {
        viewBox: "0 0 100 10",
        preserveAspectRatio: "none",
        class: "timeline",
        "aria-hidden": "true",
      },
      phaseBox(phase, duration || 1),
    );
    table.body.append(
      dataRow(PHASE_COLUMNS, [
        phase.label,
        say.milliseconds(phase.start_ms),
        say.milliseconds(phase.duration_ms),
        picture,
      ]),
    );
  }
  return table.node;
}

function attemptTable(attempts) {
  const table = dataTable("Other attempts", ATTEMPT_COLUMNS, { class: "visible-caption" });
  for (const attempt of attempts.slice(0, 50)) {
    table.body.append(
      dataRow(ATTEMPT_COLUMNS, [
        el("span", {}, nameElement(attempt.endpoint, 60), " of ", nameElement(attempt.upstream)),
        !attempt.first_byte_ms ? "none came" : say.milliseconds(attempt.first_byte_ms),
        say.milliseconds(attempt.server_ms),
        say.bytes(attempt.sent_bytes),
        say.bytes(attempt.received_bytes),
      ]),
    );
  }
  return table.node;
}
