// The panel "Topology": routes → upstreams → endpoints as a picture, then a table of each upstream.

import { changeEndpoint } from "./actions.js";
import { createChart } from "./chart.js";
import { createCurveToggle } from "./curves.js";
import {
  addressElement,
  dataRow,
  dataTable,
  el,
  filterForm,
  keyedList,
  labelled,
  nameElement,
  setAddress,
  setAttribute,
  setHidden,
  setName,
  setParts,
  setText,
} from "./dom.js";
import * as say from "./format.js";
import { createPager } from "./pager.js";
import {
  createPicture,
  endpointLevel,
  endpointProblems,
  mirrorText,
  seriousLevel,
  severity,
  stateWord,
  totalEndpoints,
} from "./picture.js";

const PAGE = 100;

const ROUTE_COLUMNS = [
  { label: "Route" },
  { label: "Upstreams" },
  { label: "Mirror" },
  { label: "Calls", numeric: true },
  { label: "5xx, aborted", numeric: true },
  { label: "4xx", numeric: true },
  { label: "p99 (1\u00a0min)", numeric: true },
];

const ENDPOINT_COLUMNS = [
  { label: "Endpoint" },
  { label: "Health", name: "health" },
  { label: "In flight", numeric: true },
  { label: "Calls", numeric: true },
  { label: "By status", name: "statuses" },
  { label: "Failures", name: "failures" },
  { label: "p50 (1\u00a0min)", numeric: true },
  { label: "p99 (1\u00a0min)", numeric: true },
  { label: "Models", name: "models" },
  { label: "Dialect", name: "dialect" },
  { label: "Action", name: "action", hidden: true },
];

export function createTopology({ navigate, announce }) {
  const picture = createPicture();
  const frame = el(
    "div",
    {
      class: "scroll",
      tabindex: "0",
      role: "region",
      "aria-label": "Picture of routes, upstreams and endpoints",
    },
    picture.node,
  );
  const routes = createRoutes();
  const upstreamFilter = el(
    "select",
    { id: "topology-upstream" },
    el("option", { value: "" }, "all upstreams"),
  );
  const search = el("input", { type: "search", id: "topology-search", autocomplete: "off" });
  const pager = createPager("endpoints", (offset) => changeFilters({ offset }));
  const actionNote = el("p", { class: "muted" });
  const list = el("div");
  const nothing = el("p", { class: "empty" }, "No endpoint matches.");
  let parameters = {};
  let latest = null;
  let hasStatuses = false;
  let leftOut = [];
  let width = 0;

  const renderUpstreams = keyedList(
    list,
    // Other columns take another table.
    (upstream) => JSON.stringify([upstream.name, leftOut]),
    () => createUpstream({ announce, leftOut, now: () => latest.time }),
  );
  const renderOptions = keyedList(
    upstreamFilter,
    (each) => each.value,
    ({ value, text }) => ({
      node: el("option", { value }, text),
      update() {},
    }),
  );

  upstreamFilter.addEventListener("change", () =>
    changeFilters({ upstream: upstreamFilter.value }),
  );
  let typing = null;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => changeFilters({ search: search.value.trim() }), 250);
  });

  function changeFilters(changes) {
    navigate("topology", { ...parameters, offset: "", ...changes });
  }

  const node = el(
    "div",
    {},
    frame,
    filterForm(
      "Endpoints",
      labelled("Upstream", upstreamFilter),
      labelled("Endpoint or state has", search),
      pager.node,
    ),
    actionNote,
    nothing,
    list,
    routes.node,
  );
  setHidden(nothing, true);

  new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    if (latest && width) picture.update(latest, width);
  }).observe(frame);

  function update(topology) {
    latest = topology;
    hasStatuses ||= topology.upstreams.some((upstream) =>
      upstream.endpoints.some((endpoint) => endpoint.statuses_per_second),
    );
    leftOut = [];
    if (!hasStatuses) leftOut.push("statuses");
    if (!topology.actions) leftOut.push("action");
    picture.update(topology, width || frame.clientWidth || 900);
    routes.update(topology.routes);
    renderOptions([
      { value: "", text: "all upstreams" },
      ...topology.upstreams
        .slice(0, 1000)
        .map(({ name }) => ({ value: name, text: name.slice(0, 60) })),
    ]);
    if (document.activeElement !== upstreamFilter) upstreamFilter.value = parameters.upstream ?? "";
    const filtered = parameters.upstream || parameters.search || parameters.offset;
    const shown = topology.upstreams.filter(
      (each) =>
        each.endpoints.length > 0 ||
        (!filtered && totalEndpoints(each) === 0) ||
        (parameters.upstream === each.name && !parameters.search),
    );
    renderUpstreams(shown);
    setHidden(nothing, shown.length > 0 || topology.upstreams.length === 0);
    const relevant = topology.upstreams.filter(
      (each) => !parameters.upstream || each.name === parameters.upstream,
    );
    const total = relevant.reduce(
      (sum, each) => sum + (each.endpoints_fitting ?? totalEndpoints(each)),
      0,
    );
    const here = shown.reduce((sum, each) => sum + each.endpoints.length, 0);
    pager.update({ offset: Number(parameters.offset) || 0, here, total, limit: PAGE });
    setText(
      actionNote,
      topology.actions ? "" : "Endpoints cannot be drained here: the setting admin.actions is off.",
    );
    setHidden(actionNote, topology.actions);
  }

  return {
    id: "topology",
    title: "Topology",
    node,
    topics: () => ({ topology: topologyQuery(parameters) }),
    show(next) {
      parameters = next;
      if (document.activeElement !== search) search.value = next.search ?? "";
      upstreamFilter.value = next.upstream ?? "";
    },
    hide: () => clearTimeout(typing),
    update: (topic, document) => topic === "topology" && update(document),
  };
}

function topologyQuery({ upstream, search, offset }) {
  const query = { limit: PAGE };
  if (upstream) query.upstream = upstream;
  if (search) query.search = search;
  if (Number(offset)) query.offset = Number(offset);
  return query;
}

function createRoutes() {
  const table = dataTable("Routes", ROUTE_COLUMNS, { class: "visible-caption routes" });
  const render = keyedList(
    table.body,
    (route) => route.name,
    () => {
      const match = nameElement("", 80);
      const cells = ROUTE_COLUMNS.map(() => el("span", { dir: "auto" }));
      const number = el("span", { class: "muted line" });
      const [calls, errors, times] = [
        createChart({ label: "Calls per second", format: say.rate }),
        createChart({ label: "Errors per second", format: say.rate, kind: "bad" }),
        createChart({ label: "p99 (1\u00a0min)", format: say.milliseconds }),
      ];
      const entry = { nodes: [], update };
      let name = "";
      const toggle = createCurveToggle(entry, ROUTE_COLUMNS, "the last hour", () => ({
        route: name,
      }));
      const row = dataRow(ROUTE_COLUMNS, [
        [match, number, el("span", { class: "line" }, toggle)],
        cells[1],
        cells[2],
        [cells[3], calls.node],
        [cells[4], errors.node],
        cells[5],
        [cells[6], times.node],
      ]);
      entry.nodes.push(row);
      return entry;

      function update(route) {
        name = route.name;
        setAttribute(toggle, "aria-label", `Curves of route ${name} over the last hour`);
        setName(match, route.match || "all calls", 80);
        setText(number, `route ${route.name}`);
        setText(cells[1], route.upstreams.map(routeUpstream).join("; "));
        setText(
          cells[2],
          route.mirror ? `${mirrorText(route.mirror)} to ${route.mirror.upstream}` : "none",
        );
        const { recent } = route;
        setText(cells[3], say.rate(route.calls_per_second));
        setText(cells[4], say.percent(route.error_ratio));
        setText(cells[5], say.percent(route.client_error_ratio));
        setText(cells[6], say.milliseconds(route.p99_ms));
        const time = { end: recent.end, step: recent.step_seconds, span: 30 };
        calls.update(recent.calls_per_second, time);
        errors.update(recent.errors_per_second, time);
        times.update(recent.p99_ms, time);
        setAttribute(row, "data-level", route.error_ratio > 0.01 ? "error" : null);
      }
    },
  );
  return { node: el("section", {}, table.node), update: (routes) => render(routes.slice(0, 200)) };
}

function routeUpstream({ name, weight, calls_per_second: calls, error_ratio: errors }) {
  const flow = errors > 0 ? `${say.rate(calls)}, ${say.percent(errors)} errors` : say.rate(calls);
  return `${name} (weight ${weight}): ${flow}`;
}

function createUpstream({ announce, leftOut, now }) {
  const title = nameElement();
  const state = el("strong", { class: "state" });
  const facts = el("p", { class: "summary", dir: "auto" });
  const columns = ENDPOINT_COLUMNS.filter((column) => !leftOut.includes(column.name));
  const table = dataTable("", columns, { class: "endpoints wide" });
  const captionName = nameElement();
  table.caption.append("Endpoints of ", captionName);
  table.caption.className = "hidden-text";
  let name = "";
  /** Where endpoints were first: one that is drained keeps its place. */
  const places = new Map();
  const render = keyedList(
    table.body,
    ({ endpoint }) => endpoint.url,
    () => createEndpoint({ columns, upstream: () => name, announce }),
  );
  const node = el(
    "section",
    { class: "upstream" },
    el("div", { class: "title-row" }, el("h2", {}, "Upstream ", title), state, facts),
    table.node,
  );
  return {
    node,
    update(upstream) {
      name = upstream.name;
      setName(title, name);
      setName(captionName, name);
      const [word, level] = upstreamState(upstream);
      setText(state, word);
      setAttribute(state, "data-level", level);
      setText(facts, upstreamFacts(upstream));
      for (const { url } of upstream.endpoints) {
        if (!places.has(url)) places.set(url, places.size);
      }
      const sorted = [...upstream.endpoints].sort(
        (a, b) => severity(a.state) - severity(b.state) || places.get(a.url) - places.get(b.url),
      );
      const dialectOfAll = upstream.dialect;
      render(sorted.map((endpoint) => ({ endpoint, now: now(), dialectOfAll })));
    },
  };
}

function upstreamState(upstream) {
  const { healthy, unreachable_reason: reason, required } = upstream;
  const serious = seriousLevel(upstream);
  if (reason) return [`cannot be reached: ${reason}`, serious];
  if (healthy === false) {
    return [
      required ? "no endpoint is healthy; the gateway is not ready" : "no endpoint is healthy",
      serious,
    ];
  }
  const problems = endpointProblems(upstream);
  if (problems) {
    return [`${problems} of ${say.plural(totalEndpoints(upstream), "endpoint")}`, "warning"];
  }
  return healthy === null ? ["not checked: health_check is not set", "unknown"] : ["healthy", "ok"];
}

function upstreamFacts(upstream) {
  const { dialect, inference_protocol: protocol, concurrency } = upstream;
  const parts = [
    say.plural(totalEndpoints(upstream), "endpoint"),
    `${say.rate(upstream.calls_per_second)} calls`,
    `${say.rate(upstream.failures_per_second)} failures`,
    `dialect ${withReason(dialect)}`,
    `infers over ${withReason(protocol)}`,
  ];
  if (concurrency) {
    parts.push(
      `${say.count(concurrency.active)} of at most ${say.count(concurrency.max_requests)} calls run, ` +
        `${say.count(concurrency.queued)} wait`,
    );
  }
  if (!upstream.required) parts.push("not required for readiness");
  return parts.join(" · ");
}

function withReason(found) {
  const name = found?.name ?? "not known until a server answers";
  if (!found) return name;
  return found.reason ? `${name} (${found.reason})` : name;
}

function createEndpoint({ columns, upstream, announce }) {
  const url = addressElement();
  const grpc = el("span", { class: "muted line" });
  const memory = el("span", { class: "muted line", dir: "auto" });
  const state = el("strong", { class: "state" });
  const stateText = el("span", { class: "line", dir: "auto" });
  const since = el("span", { class: "muted line" });
  const lastError = el("span", { class: "muted line", dir: "auto" });
  const calls = el("span");
  const chart = createChart({ label: "Calls per second", format: say.rate });
  const p99 = el("span");
  const slow = createChart({ label: "p99 (1\u00a0min)", format: say.milliseconds });
  const failed = createChart({ label: "Failures per second", format: say.rate, kind: "bad" });
  const models = el("a", {});
  const dialect = el("span", { dir: "auto" });
  const reason = el("span", { class: "muted clamp", dir: "auto" });
  const [inFlight, statuses, failures, p50] = ["", "", "", ""].map(() => el("span"));
  const callsLink = el("a", {}, "calls");
  const button = el("button", { type: "button" });
  const entry = { nodes: [], update };
  const toggle = createCurveToggle(entry, columns, "the last hour", () => ({
    upstream: upstream(),
    endpoint: shown.url,
  }));
  const cells = [
    [url, grpc, memory, el("span", { class: "line" }, callsLink, " · ", toggle)],
    [state, since, stateText, lastError],
    inFlight,
    [calls, chart.node],
    statuses,
    [failures, failed.node],
    p50,
    [p99, slow.node],
    models,
    [dialect, reason],
    button,
  ];
  const shownCells = cells.filter((_, index) => columns.includes(ENDPOINT_COLUMNS[index]));
  const row = dataRow(columns, shownCells);
  let shown = null;
  button.addEventListener("click", async () => {
    const { url: endpoint, state: before } = shown;
    const action = before === "drained" ? "restore" : "drain";
    if (await changeEndpoint(action, upstream(), endpoint)) {
      announce(`${endpoint} of ${upstream()} is ${action === "drain" ? "drained" : "restored"}.`);
    }
  });
  entry.nodes.push(row);
  return entry;

  function update({ endpoint, now, dialectOfAll }) {
    shown = endpoint;
    const level = endpointLevel(endpoint.state);
    setAttribute(row, "data-level", level === "ok" ? null : level);
    setAddress(url, endpoint.url);
    setAttribute(toggle, "aria-label", `Curves of ${endpoint.url} over the last hour`);
    setText(since, sinceText(endpoint, now, level));
    setText(grpc, endpoint.grpc_url ? `gRPC: ${endpoint.grpc_url}` : "");
    setText(memory, memoryText(endpoint));
    setText(state, stateWord(endpoint));
    setAttribute(state, "data-level", level);
    setText(stateText, sentence(endpoint));
    setText(lastError, lastErrorText(endpoint));
    setText(inFlight, say.count(endpoint.requests_in_progress));
    setText(calls, say.rate(endpoint.calls_per_second));
    setParts(statuses, say.ratesByName(endpoint.statuses_per_second));
    const setFailures = endpoint.failures_per_second > 0 ? setParts : setText;
    setFailures(failures, failureText(endpoint));
    setText(p50, say.milliseconds(endpoint.p50_ms));
    setText(p99, say.milliseconds(endpoint.p99_ms));
    const { recent } = endpoint;
    setHidden(chart.node, !recent);
    setHidden(slow.node, !recent);
    setHidden(failed.node, !recent);
    if (recent) {
      const time = { end: recent.end ?? now, step: recent.step_seconds, span: 30 };
      chart.update(recent.calls_per_second, time);
      slow.update(recent.p99_ms, time);
      failed.update(recent.errors_per_second, time);
    }
    setText(models, modelText(endpoint));
    const query = new URLSearchParams({ endpoint: endpoint.url, upstream: upstream() });
    setAttribute(models, "href", modelsLink(endpoint));
    setAttribute(callsLink, "href", `#calls?${query}`);
    setAttribute(callsLink, "aria-label", `Calls of ${endpoint.url}`);
    const found = endpoint.dialect ?? dialectOfAll;
    setText(dialect, found?.name ?? "not known until it answers");
    setText(reason, found?.reason ?? "");
    setAttribute(reason, "title", found?.reason);
    const restores = endpoint.state === "drained";
    setText(button, restores ? "Restore" : "Drain");
    setAttribute(button, "aria-label", `${restores ? "Restore" : "Drain"} ${endpoint.url}`);
  }
}

/** Say since when an endpoint is not as it should be. */
function sinceText({ state_since: since }, now, level) {
  if (!since || level === "ok") return "";
  return `since ${say.clock(since)}, ${say.ago(since, now)}`;
}

function modelsLink({ models }) {
  if (!models) return null;
  return models.length === 1 ? modelLink(models[0]) : "#models";
}

export function modelLink(name) {
  return `#models?${new URLSearchParams({ name })}`;
}

/** Return the rest of an endpoint's sentence, as its first word stands before it. */
function sentence({ state, state_text: text }) {
  if (!text) return "";
  return text.startsWith(`${state} `)
    ? text.slice(state.length + 1)
    : text.replace(`${state}: `, "");
}

function lastErrorText({ last_error: error, last_error_at: at, state_text: text }) {
  if (!error || (text && text.includes(error))) return "";
  return `last error at ${say.clock(at)}: ${error}`;
}

function memoryText({ shared_memory: memory }) {
  if (!memory) return "";
  if (!memory.size) return `no shared memory: ${memory.why_not}`;
  const { size, allocated, in_use: used, quarantined, why_not: reason } = memory;
  const parts = [`${say.bytes(used)} of ${say.bytes(allocated)} in use, at most ${say.bytes(size)}`];
  if (quarantined) parts.push(`${say.bytes(quarantined)} in quarantine`);
  if (reason) parts.push(`not in all workers: ${reason}`);
  return `shared memory: ${parts.join(", ")}`;
}

function failureText({
  failures_per_second: rate,
  failures_by_kind_per_second: kinds,
  failures,
  failures_total: total,
}) {
  if (rate > 0) return say.ratesByName(kinds, say.failureName);
  return total > 0
    ? `none now; since the start ${say.countsByName(failures, say.failureName)}`
    : "none";
}

function modelText({ models, models_total: total }) {
  if (!models) return total ? say.plural(total, "model") : "not asked (model_discovery)";
  const size = total ?? models.length;
  return size === 1 && models.length === 1 ? models[0].slice(0, 40) : say.plural(size, "model");
}
