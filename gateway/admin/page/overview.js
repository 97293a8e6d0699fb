// The panel "Overview": what is wrong now, the numbers of all calls, the gateway and its settings.

import { readJson } from "./api.js";
import { createChart } from "./chart.js";
import {
  choices,
  el,
  factTable,
  dataRow,
  dataTable,
  keyedList,
  setAttribute,
  setHidden,
  setText,
} from "./dom.js";
import * as say from "./format.js";

const RANGES = {
  recent: { label: "5 minutes", most: 300, least: 60 },
  hour: { label: "1 hour", most: 360, least: 60 },
};
const HOUR_REFRESH = 10000;
const FIRST_PROBLEMS = 8;
const MOST_PROBLEMS = 500;

/** The tile "Errors" has those of clients in a line of their own. */
const ratio = (errors, calls) =>
  calls.map((all, index) => (all > 0 ? (errors[index] ?? 0) / all : all === 0 ? 0 : null));

const TILES = [
  { name: "Calls", now: "calls_per_second", format: say.rate, of: (h) => h.calls_per_second },
  {
    name: "Errors",
    now: "error_ratio",
    format: say.percent,
    of: (h) => ratio(h.errors_per_second, h.calls_per_second),
    more: (now) => ["5xx and aborted.", `4xx: ${say.percent(now.client_error_ratio)}`],
    kind: "bad",
  },
  ...["p50", "p95", "p99"].map((name) => ({
    name: `Duration, ${name}`,
    now: `${name}_ms`,
    format: say.milliseconds,
    of: (h) => h[`${name}_ms`],
    more: (now) => [`Of the ${say.lastSeconds(now.duration_window_seconds)}`],
  })),
  {
    name: "Calls in progress",
    now: "requests_in_progress",
    format: say.count,
    of: (h) => h.requests_in_progress,
  },
];

const WORKER_COLUMNS = [
  { label: "Worker" },
  { label: "State" },
  { label: "Connections", numeric: true },
  { label: "Calls in progress", numeric: true },
  { label: "Tasks", numeric: true },
  { label: "Buffered", numeric: true },
  { label: "Last report", numeric: true },
];

const VALUE_COLUMNS = [
  { label: "Time" },
  { label: "Calls", numeric: true },
  { label: "5xx, aborted", numeric: true },
  { label: "4xx", numeric: true },
  { label: "p50", numeric: true },
  { label: "p95", numeric: true },
  { label: "p99", numeric: true },
  { label: "In progress", numeric: true },
];

export function createOverview() {
  const problems = createProblems();
  const tiles = TILES.map(createTile);
  const traffic = el("p", { class: "summary" });
  const gateway = factTable("The gateway");
  const settings = factTable("Settings");
  const message = el("pre", { class: "message", dir: "auto" });
  const workers = createWorkers();
  const values = createValueTable();
  let range = "recent";
  let latest = null;
  let hour = null;
  let hourReadAt = 0;
  let visible = false;

  const ranges = choices(
    "Time range of the charts",
    Object.entries(RANGES).map(([name, { label }]) => [name, label]),
    range,
    choose,
  );
  const node = el(
    "div",
    {},
    problems.node,
    el(
      "section",
      { "aria-labelledby": "calls-title" },
      el(
        "div",
        { class: "title-row" },
        el("h2", { id: "calls-title" }, "All calls"),
        ranges,
        traffic,
      ),
      el("div", { class: "tiles" }, ...tiles.map((tile) => tile.node)),
      values.node,
    ),
    el(
      "div",
      { class: "columns" },
      el("section", {}, el("h2", {}, "Gateway"), gateway.node),
      el("section", {}, el("h2", {}, "Settings"), settings.node),
    ),
    el("section", {}, workers.node),
  );

  function choose(name) {
    range = name;
    if (range === "hour") readHour();
    showCharts();
  }

  async function readHour() {
    hourReadAt = performance.now();
    try {
      hour = (await readJson("history")).history;
      showCharts();
      values.update(hour);
    } catch {
      // The connection's state is shown at the top; the next event tries again.
    }
  }

  function showCharts() {
    const history = range === "hour" ? hour : latest?.recent;
    const { most, least } = RANGES[range];
    // While the gateway is young, less time is shown.
    const span = Math.min(most, Math.max(least, history?.calls_per_second.length ?? 0));
    for (const tile of tiles) tile.update(latest?.now, history, span);
  }

  function update(overview) {
    latest = overview;
    problems.update(overview.problems);
    showCharts();
    const { now } = overview;
    setText(
      traffic,
      `${say.plural(now.connections, "connection")} · received ${say.byteRate(now.request_bytes_per_second)} · ` +
        `sent ${say.byteRate(now.response_bytes_per_second)} · buffered ${say.bytes(now.buffered_bytes)}`,
    );
    gateway.show(gatewayFacts(overview));
    settings.show(settingsFacts(overview, message));
    workers.update(overview);
    const wanted = visible && (range === "hour" || values.isOpen());
    if (wanted && performance.now() - hourReadAt > HOUR_REFRESH) readHour();
  }

  values.onOpen(readHour);
  return {
    id: "overview",
    title: "Overview",
    node,
    topics: () => ({}),
    show() {
      visible = true;
      if (range === "hour") readHour();
    },
    hide() {
      visible = false;
    },
    update: (topic, document) => topic === "overview" && update(document),
  };
}

/** Return where a problem is explained: the panel, with what leads to the endpoint. */
export function problemLink({ panel, upstream, endpoint }) {
  const parameters = new URLSearchParams();
  if (upstream) parameters.set("upstream", upstream);
  if (endpoint) parameters.set(panel === "topology" ? "search" : "endpoint", endpoint);
  const text = parameters.toString();
  return `#${panel}${text && `?${text}`}`;
}

/** Return what stays the same of a problem while its numbers change. */
export function problemKey({ level, panel, upstream, endpoint, text }) {
  return JSON.stringify([
    level,
    panel,
    upstream,
    endpoint,
    endpoint ? "" : text.replace(/[\d.,]+/g, "#"),
  ]);
}

function createProblems() {
  const title = el("h2", {}, "What is wrong now");
  const nothing = el("p", { class: "all-well" }, "Nothing is wrong.");
  const list = el("ul", { class: "problems" });
  const more = el("button", { type: "button", onclick: () => showAll() });
  let all = false;
  let latest = [];
  const render = keyedList(list, problemKey, (problem) => {
    const text = el("span", { dir: "auto" });
    const level = el("strong", { class: "level" });
    const since = el("span", { class: "muted unbroken" });
    const link = el("a", {}, "Show");
    const item = el("li", {}, level, el("span", {}, text, " ", since), link);
    return {
      node: item,
      update(next) {
        setAttribute(item, "data-level", next.level);
        setText(level, next.level === "error" ? "Error" : "Warning");
        setText(text, next.text);
        setText(since, next.since ? `(since ${say.clock(next.since)})` : "");
        setHidden(link, next.panel === "overview");
        setAttribute(link, "href", problemLink(next));
        setAttribute(link, "aria-label", `Show in ${next.panel}: ${next.text}`);
      },
    };
  });
  setHidden(nothing, true);

  function showAll() {
    all = !all;
    update(latest);
  }

  function update(problems) {
    latest = problems;
    setHidden(nothing, problems.length > 0);
    setHidden(list, problems.length === 0);
    const sorted = [...problems].sort((a, b) =>
      a.level === b.level ? 0 : a.level === "error" ? -1 : 1,
    );
    render(sorted.slice(0, all ? MOST_PROBLEMS : FIRST_PROBLEMS));
    setHidden(more, problems.length <= FIRST_PROBLEMS);
    setText(more, all ? "Show fewer" : `Show all ${say.count(problems.length)}`);
  }

  return { node: el("section", { class: "wrong" }, title, nothing, list, more), update };
}

function createTile({ name, now, format, of, more, kind }) {
  const value = el("p", { class: "value" }, say.UNKNOWN);
  const notes = more ? [0, 1].map(() => el("span", { class: "unbroken" })) : [];
  const note = more ? el("p", { class: "muted" }, notes[0], " ", notes[1]) : null;
  const chart = createChart({ label: name, format, height: 56, tall: true, kind });
  const node = el("div", { class: "tile" }, el("h3", {}, name), value, note, chart.node);
  return {
    node,
    update(numbers, history, span) {
      if (numbers) {
        setText(value, format(numbers[now]));
        more?.(numbers).forEach((text, index) => setText(notes[index], text));
        setAttribute(value, "data-level", kind === "bad" && numbers[now] > 0 ? "error" : null);
      }
      if (history)
        chart.update(of(history), { end: history.end, step: history.step_seconds, span });
    },
  };
}

function gatewayFacts({
  version,
  build,
  python,
  started_at: startedAt,
  time,
  draining,
  workers,
  actions,
}) {
  return [
    [
      "State",
      draining ? "It drains: it takes no new connections, and will stop" : "It takes calls",
    ],
    ["Version", version],
    ["Build", build],
    ["Python", python],
    ["Started", `${say.clock(startedAt)}, ${say.ago(startedAt, time)}`],
    ["Workers", say.plural(workers.length, "process", "processes")],
    [
      "Actions",
      actions
        ? "Endpoints can be drained here, with an API key"
        : "This page only reads (admin.actions is off)",
    ],
  ];
}

function settingsFacts({ settings, time }, message) {
  const rows = [
    ["File", settings.file ?? "none"],
    [
      "In use",
      `settings number ${settings.number}, since ${say.clock(settings.loaded_at)}, ${say.ago(settings.loaded_at, time)}`,
    ],
  ];
  if (settings.last_failure === null || settings.last_failure === undefined) {
    rows.push(["Last failed reload", "none"]);
    return rows;
  }
  const when =
    say.unixTime(settings.failed_at) === null
      ? "The last reload failed"
      : `Failed at ${say.clock(settings.failed_at)}, ${say.ago(settings.failed_at, time)}`;
  rows.push(["Last failed reload", `${when}. The settings before it are still in use.`]);
  setText(message, settings.last_failure);
  rows.push(["Its message", message]);
  return rows;
}

function createWorkers() {
  const table = dataTable("Workers", WORKER_COLUMNS, { class: "visible-caption" });
  const render = keyedList(
    table.body,
    (worker) => worker.pid,
    (worker) => {
      const cells = WORKER_COLUMNS.map(() => el("span"));
      const row = dataRow(WORKER_COLUMNS, cells);
      return {
        node: row,
        update(next) {
          const late = next.seconds_since_update > 5;
          const texts = [
            `process ${next.pid}`,
            late ? "does not report" : next.draining ? "drains" : "takes calls",
            say.count(next.connections),
            say.count(next.requests_in_progress),
            say.count(next.tasks),
            say.bytes(next.buffered_bytes),
            `${say.seconds(next.seconds_since_update)} ago`,
          ];
          texts.forEach((text, index) => setText(cells[index], text));
          setAttribute(row, "data-level", late ? "warning" : null);
        },
      };
    },
  );
  return { node: table.node, update: ({ workers }) => render(workers) };
}

/** Create the values of the charts as a table, a row for each minute of the last hour. */
function createValueTable() {
  const table = dataTable("All calls, by minute, newest first", VALUE_COLUMNS);
  const node = el("details", {}, el("summary", {}, "The last hour as a table"), table.node);
  const render = keyedList(
    table.body,
    (row) => row.end,
    () => {
      const cells = VALUE_COLUMNS.map(() => el("span"));
      return {
        node: dataRow(VALUE_COLUMNS, cells),
        update(row) {
          const texts = [
            say.clock(row.end),
            say.rate(row.calls),
            say.rate(row.errors),
            say.rate(row.clientErrors),
            ...row.durations.map(say.milliseconds),
            say.count(row.inProgress),
          ];
          texts.forEach((text, index) => setText(cells[index], text));
        },
      };
    },
  );
  return {
    node,
    isOpen: () => node.open,
    onOpen: (read) => node.addEventListener("toggle", () => node.open && read()),
    update: (history) => node.open && render(minutes(history)),
  };
}

/**
 * Merge the steps of a history into minutes, newest first: means of rates, the most calls in
 * progress. The percentiles of a step are those of the minute that ends there.
 */
export function minutes(history) {
  const perMinute = Math.max(1, Math.round(60 / history.step_seconds));
  const total = history.calls_per_second.length;
  const rows = [];
  for (let last = total; last > 0; last -= perMinute) {
    const part = (name) =>
      history[name].slice(Math.max(0, last - perMinute), last).filter((value) => value !== null);
    const mean = (values) =>
      values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
    const most = (values) => (values.length ? Math.max(...values) : null);
    rows.push({
      end: history.end - (total - last) * history.step_seconds,
      calls: mean(part("calls_per_second")),
      errors: mean(part("errors_per_second")),
      clientErrors: mean(part("client_errors_per_second")),
      durations: ["p50_ms", "p95_ms", "p99_ms"].map((name) => part(name).at(-1) ?? null),
      inProgress: most(part("requests_in_progress")),
    });
  }
  return rows;
}
