// The panel "Models": a list with rates, and the details of one model.

import { changeTraceSettings, settingText } from "./actions.js";
import { readJson } from "./api.js";
import {
  dataRow,
  dataTable,
  el,
  factTable,
  filterForm,
  keyedList,
  labelled,
  nameElement,
  plainText,
  setAttribute,
  setHidden,
  setName,
  setText,
} from "./dom.js";
import * as say from "./format.js";
import { createPager } from "./pager.js";
import { modelLink } from "./topology.js";

const PAGE = 100;
const DISCOVERY = "the upstream's setting model_discovery asks them";
const REFRESH = 5000;

const COLUMNS = [
  { label: "Model" },
  { label: "Ready" },
  { label: "Calls", numeric: true },
  { label: "5xx, aborted", numeric: true },
  { label: "4xx", numeric: true },
  { label: "p50 (1\u00a0min)", numeric: true },
  { label: "p99 (1\u00a0min)", numeric: true },
  { label: "Forms" },
  { label: "By status" },
];

const TENSOR_COLUMNS = [{ label: "Tensor" }, { label: "Datatype" }, { label: "Shape" }];

export function createModels({ navigate, announce }) {
  const list = createList({ navigate });
  const details = createDetails({ announce, refresh: () => read() });
  const node = el("div", {}, list.node, details.node);
  let parameters = {};
  let timer = null;
  let reading = 0;

  // The details are not in the stream: they ask a server, and change seldom.
  async function read() {
    clearTimeout(timer);
    const ticket = ++reading;
    try {
      const document = await readJson("model", { name: parameters.name });
      if (ticket === reading) details.update(document);
    } catch (error) {
      if (ticket === reading) details.failed(error);
    }
    if (ticket === reading) timer = setTimeout(read, document.hidden ? 10 * REFRESH : REFRESH);
  }

  function stopReading() {
    reading += 1;
    clearTimeout(timer);
  }

  return {
    id: "models",
    title: "Models",
    node,
    topics: () => (parameters.name === undefined ? { models: modelsQuery(parameters) } : {}),
    show(next) {
      stopReading();
      parameters = next;
      setHidden(list.node, next.name !== undefined);
      setHidden(details.node, next.name === undefined);
      if (next.name === undefined) list.show(next);
      else {
        details.show(next);
        read();
      }
    },
    hide() {
      stopReading();
      list.hide();
    },
    update(topic, document) {
      if (topic === "models") list.update(document);
      if (topic === "overview") details.allow(document.actions);
    },
  };
}

function modelsQuery({ search, offset }) {
  const query = { limit: PAGE };
  if (search) query.search = search;
  if (Number(offset)) query.offset = Number(offset);
  return query;
}

function createList({ navigate }) {
  const search = el("input", { type: "search", id: "models-search", autocomplete: "off" });
  const pager = createPager("models", (offset) => navigate("models", { ...parameters, offset }));
  const nothing = el(
    "p",
    { class: "empty" },
    "No model matches. Models appear when a server has them ready, or after a call.",
  );
  const table = dataTable("Models", COLUMNS, { class: "models wide" });
  let parameters = {};
  let typing = null;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => navigate("models", { search: search.value.trim() }), 250);
  });
  setHidden(nothing, true);
  const render = keyedList(table.body, (model) => model.name, createRow);
  return {
    node: el(
      "div",
      {},
      filterForm("Models", labelled("Model has", search), pager.node),
      nothing,
      table.node,
    ),
    hide: () => clearTimeout(typing),
    show(next) {
      parameters = next;
      if (document.activeElement !== search) search.value = next.search ?? "";
    },
    update({ models, total, ...more }) {
      const filtered = parameters.search || parameters.offset;
      const rows = filtered ? models : [...models, ...otherRows(more)];
      setHidden(nothing, rows.length > 0);
      setHidden(table.node, rows.length === 0);
      render(rows);
      pager.update({
        offset: Number(parameters.offset) || 0,
        here: models.length,
        total,
        limit: PAGE,
      });
    },
  };
}

function createRow() {
  const name = nameElement("", 60);
  const link = el("a", {}, name);
  const cells = COLUMNS.map(() => el("span", { dir: "auto" }));
  const row = dataRow(COLUMNS, [link, ...cells.slice(1)]);
  return {
    node: row,
    update(model) {
      setName(name, model.label ?? model.name, 60);
      setAttribute(link, "href", model.label ? null : modelLink(model.name));
      [
        model.label ? model.note : readiness(model),
        say.rate(model.calls_per_second),
        say.percent(model.error_ratio),
        say.percent(model.client_error_ratio),
        say.milliseconds(model.p50_ms),
        say.milliseconds(model.p99_ms),
        say.ratesByName(model.forms_per_second, say.formName),
        say.ratesByName(model.statuses_per_second),
      ].forEach((text, index) => setText(cells[index + 1], text));
      setAttribute(row, "data-level", model.error_ratio > 0.01 ? "error" : null);
      setAttribute(row, "data-idle", model.calls_per_second === undefined);
    },
  };
}

/** Return the rows of calls that are of no model with numbers of its own, so that all add up. */
function otherRows({ others, no_model: noModel }) {
  const rows = [
    {
      name: " others",
      label: "other models",
      note: "those without numbers of their own: a model gets them when a call of it has succeeded",
      ...others,
    },
    { name: " none", label: "no model", note: "calls that name none, as of health", ...noModel },
  ];
  return rows.filter((row) => row.calls_per_second > 0);
}

/** Say where a model is ready: "on 3 of 4 endpoints of triton". */
function readiness({ ready, last_failure: failure, calls_per_second: calls }) {
  if (failure && calls === undefined) {
    const reason = failure.reason ? `: ${failure.reason}` : "";
    return (
      `no call has succeeded; the last one failed at ${say.clock(failure.time)} ` +
      `with ${say.callStatus(failure.status)}${reason}`
    );
  }
  if (!ready?.length) return `not known: no server lists it (${DISCOVERY})`;
  const parts = ready.slice(0, 4).map(({ upstream, endpoints, of }) => {
    const name = upstream.slice(0, 60);
    if (endpoints === 0) return `nowhere of ${name}`;
    if (of === 1) return `on ${name}`;
    return endpoints === of
      ? `on all ${say.count(of)} of ${name}`
      : `on ${say.count(endpoints)} of ${say.count(of)} of ${name}`;
  });
  if (ready.length > 4) parts.push(`${say.count(ready.length - 4)} more upstreams`);
  return parts.join("; ");
}

function createDetails({ announce, refresh }) {
  const title = nameElement("", 80);
  const showAll = el("button", { type: "button", class: "small" }, "Show the whole name");
  const failure = el("p", { class: "failure" });
  const reading = el("p", { class: "muted" }, "The gateway asks a server …");
  const facts = factTable("Calls of this model");
  const saved = factTable("What conversion saved");
  const metadata = factTable("Metadata");
  const metadataNote = el("p", { class: "muted", dir: "auto" });
  const traceNote = el("p", { class: "muted", dir: "auto" });
  const trace = factTable("Trace settings");
  const inputs = createTensors("Inputs");
  const outputs = createTensors("Outputs");
  const endpoints = el("ul", { class: "plain" });
  const more = el("p", { class: "muted" });
  const callsLink = el("a", {}, "Its calls");
  const tryLink = el("a", {}, "Try it");
  const renderEndpoints = keyedList(
    endpoints,
    ({ upstream, endpoint }) => JSON.stringify([upstream, endpoint]),
    ({ upstream, endpoint }) => {
      const query = new URLSearchParams({ upstream, search: endpoint });
      return {
        node: el(
          "li",
          {},
          el("a", { href: `#topology?${query}` }, nameElement(endpoint, 60)),
          " of ",
          nameElement(upstream),
        ),
        update() {},
      };
    },
  );
  let wanted = "";
  let whole = false;
  let latest = null;
  let allowed = false;
  const change = el(
    "button",
    {
      type: "button",
      onclick: async () => {
        if (!(await changeTraceSettings(latest.name, latest.trace_settings))) return;
        announce(`The trace settings of ${latest.name.slice(0, 100)} are changed.`);
        refresh();
      },
    },
    "Change",
  );
  showAll.addEventListener("click", () => {
    whole = !whole;
    nameIt();
  });

  function nameIt() {
    setName(title, wanted, whole ? Infinity : 80);
    setText(showAll, whole ? "Show the short name" : "Show the whole name");
    setHidden(showAll, Array.from(plainText(wanted)).length <= 80);
  }

  const body = el(
    "div",
    { class: "columns" },
    el("section", {}, el("h3", {}, "Calls"), facts.node),
    el("section", {}, el("h3", {}, "What conversion saved"), saved.node),
    el(
      "section",
      {},
      el("h3", {}, "Inputs and outputs"),
      inputs.node,
      outputs.node,
      metadata.node,
      metadataNote,
    ),
    el("section", {}, el("h3", {}, "Ready on"), endpoints, more),
    el("section", {}, el("h3", {}, "Trace settings"), trace.node, traceNote, change),
  );
  return {
    node: el(
      "div",
      {},
      el(
        "p",
        { class: "crumbs" },
        el("a", { href: "#models" }, "All models"),
        " · ",
        callsLink,
        " · ",
        tryLink,
      ),
      el("div", { class: "title-row" }, el("h2", {}, title), showAll),
      failure,
      reading,
      body,
    ),
    show({ name }) {
      if (wanted === name) return;
      wanted = name;
      whole = false;
      nameIt();
      const query = new URLSearchParams({ model: name });
      setAttribute(callsLink, "href", `#calls?${query}`);
      setAttribute(tryLink, "href", `#try?${query}`);
      setHidden(failure, true);
      setHidden(body, true);
      setHidden(reading, false);
    },
    failed(error) {
      setHidden(reading, true);
      setText(failure, `This model cannot be read: ${error.message}`);
      setHidden(failure, false);
    },
    /** Show what changes settings, if that is allowed. */
    allow(actions) {
      allowed = Boolean(actions);
      setHidden(change, !allowed || !latest?.trace_settings);
    },
    update(model) {
      latest = model;
      setHidden(reading, true);
      setHidden(change, !allowed || !model.trace_settings);
      setHidden(failure, true);
      setHidden(body, false);
      facts.show([
        ["Calls", say.rate(model.calls_per_second)],
        [
          "Errors",
          `5xx and aborted ${say.percent(model.error_ratio)}, 4xx ${say.percent(model.client_error_ratio)}`,
        ],
        [
          "Duration",
          `p50 ${say.milliseconds(model.p50_ms)}, p99 ${say.milliseconds(model.p99_ms)}, ` +
            `of the ${say.lastSeconds(model.duration_window_seconds)}`,
        ],
        ["Forms of clients", say.ratesByName(model.forms_per_second, say.formName)],
        ["By status", say.ratesByName(model.statuses_per_second)],
        ["Ready", readiness(model)],
      ]);
      saved.show(savedFacts(model.conversion));
      const { metadata: found } = model;
      inputs.show(found?.inputs);
      outputs.show(found?.outputs);
      metadata.show(
        found
          ? [
              ["Platform", String(found.platform || "not said")],
              [
                "Versions",
                found.versions?.length
                  ? found.versions.map(String).join(", ").slice(0, 500)
                  : "not said",
              ],
            ]
          : [],
      );
      setText(
        metadataNote,
        found ? "" : `Not known: ${model.metadata_error ?? "no server was asked yet"}`,
      );
      const list = model.endpoints ?? [];
      renderEndpoints(list.slice(0, 50));
      setText(
        more,
        list.length > 50
          ? `and ${say.count(list.length - 50)} more endpoints`
          : list.length
            ? ""
            : `no server lists it (${DISCOVERY})`,
      );
      const settings = Object.entries(model.trace_settings ?? {});
      trace.show(
        settings.map(([name, value]) => [
          name.slice(0, 80),
          settingText(value).slice(0, 500) || "not set",
        ]),
      );
      setText(
        traceNote,
        model.trace_settings
          ? ""
          : `Not known: ${model.trace_settings_error ?? "no server was asked yet"}`,
      );
    },
  };
}

function savedFacts(conversion) {
  if (!conversion) return [["Converted calls", "none yet"]];
  return [
    ["Time saved", timeSaved(conversion)],
    ["Bytes saved", bytesSaved(conversion)],
    ["Elements", say.count(conversion.elements)],
  ];
}

function timeSaved({ measured, saved_ms_estimate: saved }) {
  if (!measured) return "not measured yet: compare a JSON call in Try it";
  const { converted_ms: converted, untouched_ms: untouched, elements, at } = measured;
  const calls =
    `a call of ${say.count(elements)} elements took ${say.milliseconds(converted)} ` +
    `with conversion, ${say.milliseconds(untouched)} without, at ${say.clock(at)}`;
  return saved > 0
    ? `about ${say.seconds(saved / 1000)}, as measured: ${calls}`
    : `none, as measured: ${calls}`;
}

function bytesSaved({ saved_bytes: saved, client_bytes: client, server_bytes: server }) {
  const sides = `clients' side ${say.bytes(client)}, servers' side ${say.bytes(server)}`;
  return saved > 0 ? `${say.bytes(saved)} (${sides})` : `none (${sides})`;
}

function createTensors(caption) {
  const table = dataTable(caption, TENSOR_COLUMNS, { class: "visible-caption" });
  const render = keyedList(
    table.body,
    (tensor) => tensor.name,
    () => {
      const name = nameElement("", 40);
      const [datatype, shape] = [el("span"), el("span")];
      return {
        node: dataRow(TENSOR_COLUMNS, [name, datatype, shape]),
        update(tensor) {
          setName(name, String(tensor.name), 40);
          setText(datatype, String(tensor.datatype ?? say.UNKNOWN).slice(0, 40));
          setText(shape, say.shapeText(tensor.shape));
        },
      };
    },
  );
  return {
    node: table.node,
    show(tensors) {
      setHidden(table.node, !Array.isArray(tensors));
      render((tensors ?? []).slice(0, 200));
    },
  };
}
