// Draws routes → upstreams → endpoints, with rates on the edges. The tables say the same in text.

import { beginning, keyedList, setAttribute, setText, shortName, svg } from "./dom.js";
import { count, percent, plural, rate } from "./format.js";

const LINE = 18;
const NODE = 40;
const GAP = 12;
const MOST_ROUTES = 15;
const MOST_UPSTREAMS = 12;
const ALL_ENDPOINTS = 14;
/** Of more endpoints than that. */
const SOME_ENDPOINTS = 8;

/** Narrower than that, boxes stand below each other. */
const NARROW = 600;
const INDENT = 26;

/** The states of endpoints: the word, and how bad it is. Those first in the list come first. */
const STATES = {
  ejected: ["ejected", "error"],
  unhealthy: ["unhealthy", "error"],
  unreachable: ["unreachable", "error"],
  failing: ["failing", "error"],
  slow: ["slow", "warning"],
  in_use: ["in use", "ok"],
  drained: ["drained", "warning"],
  draining: ["draining", "warning"],
};
const PROBLEMS = ["ejected", "unhealthy", "unreachable", "failing", "slow"];

/** Return what sorts endpoints: problems first. A drained one keeps its place among the others. */
export function severity(state) {
  const at = PROBLEMS.indexOf(state);
  return at < 0 ? PROBLEMS.length : at;
}

/** Return a sentence about an endpoint that begins with the word of its state. */
function stateSentence(endpoint) {
  const word = stateWord(endpoint);
  const { state, state_text: text } = endpoint;
  if (!text) return word;
  return text.startsWith(state) ? text : `${word}: ${text}`;
}

/** Return which endpoints of an upstream are not in use, as "1 ejected, 2 slow"; "" if none. */
export function endpointProblems({ endpoint_states: states }) {
  return Object.entries(STATES)
    .filter(([state, [, level]]) => level !== "ok" && states[state])
    .map(([state, [word]]) => `${count(states[state])} ${word}`)
    .join(", ");
}

/** Return how bad it is if no endpoint of an upstream can be used. */
export function seriousLevel({ required }) {
  return required ? "error" : "warning";
}

export function createPicture() {
  const edges = svg("g");
  const labels = svg("g");
  const nodes = svg("g");
  const heads = svg("g");
  const node = svg("svg", { class: "picture", role: "img" }, heads, edges, nodes, labels);
  const renderEdges = keyedList(edges, (edge) => edge.key, createEdge);
  const renderLabels = keyedList(labels, (edge) => edge.key, createLabel);
  const renderNodes = keyedList(nodes, (each) => each.key, createNode);
  const renderHeads = keyedList(heads, (each) => each.text, createHead);
  return {
    node,
    update(topology, width) {
      const picture = width < NARROW ? layOutNarrow(topology, width) : layOut(topology, width);
      setAttribute(node, "width", picture.width);
      setAttribute(node, "height", picture.height);
      setAttribute(node, "viewBox", `0 0 ${picture.width} ${picture.height}`);
      setAttribute(node, "aria-label", summary(topology));
      renderHeads(picture.heads);
      renderEdges(picture.edges);
      renderLabels(picture.edges.filter((edge) => edge.text));
      renderNodes(picture.nodes);
    },
  };
}

/** Say in one sentence what the picture shows; the tables below it have the details. */
function summary({ routes, upstreams }) {
  const endpoints = upstreams.reduce((sum, each) => sum + totalEndpoints(each), 0);
  return (
    `${plural(routes.length, "route")} to ${plural(upstreams.length, "upstream")} with ` +
    `${plural(endpoints, "endpoint")}. The tables below say the same in text.`
  );
}

export function totalEndpoints(upstream) {
  return upstream.endpoints_total ?? upstream.endpoints.length;
}

function layOut({ routes, upstreams }, width) {
  const nodeWidth = Math.min(420, Math.floor((width - 2) * 0.24));
  const space = (width - 2 - 3 * nodeWidth) / 2;
  const columns = [1, 1 + nodeWidth + space, 1 + 2 * (nodeWidth + space)];
  const characters = Math.floor((nodeWidth - 20) / 7.2);
  const nodes = [];
  const edges = [];

  const shownUpstreams = firstByRate(upstreams, MOST_UPSTREAMS);
  const perUpstream = endpointsEach(shownUpstreams);
  const middles = new Map();
  let y = LINE + 8;
  for (const upstream of shownUpstreams) {
    const targets = endpointNodes(upstream, perUpstream);
    const top = y;
    const targetNodes = targets.map((target) => {
      const placed = { ...target, x: columns[2], y, width: nodeWidth, height: NODE, characters };
      y += NODE + GAP;
      return placed;
    });
    if (!targets.length) y += NODE + GAP;
    const middle = (top + y - GAP) / 2;
    const box = {
      ...upstreamNode(upstream),
      x: columns[1],
      y: middle - NODE / 2,
      width: nodeWidth,
      height: NODE,
      characters,
    };
    middles.set(upstream.name, middle);
    nodes.push(box, ...targetNodes);
    targetNodes.forEach((target, index) =>
      edges.push({
        key: `${box.key} ${target.key}`,
        from: [box.x + nodeWidth, middle + spread(index, targetNodes.length)],
        to: [target.x, target.y + NODE / 2],
        at: 0.68,
        text: target.rate === null ? "" : flowText(target.rate, target.errors),
        short: rate(target.rate),
        rate: target.rate ?? 0,
        level: target.level === "error" || target.errors > 0.01 ? "error" : "ok",
      }),
    );
    y += GAP;
  }
  const upstreamsBottom = y;

  const shownRoutes = firstByRate(routes, MOST_ROUTES);
  const needed = shownRoutes.length * (NODE + GAP);
  const free = Math.max(0, upstreamsBottom - LINE - 8 - needed);
  let routeY = LINE + 8 + free / 2;
  for (const route of shownRoutes) {
    const box = {
      ...routeNode(route),
      x: columns[0],
      y: routeY,
      width: nodeWidth,
      height: NODE,
      characters,
    };
    nodes.push(box);
    const flows = route.upstreams.map((each) => ({ ...each, mirror: false }));
    if (route.mirror) flows.push({ ...route.mirror, name: route.mirror.upstream, mirror: true });
    flows.forEach((flow, index) => {
      if (!middles.has(flow.name)) return;
      edges.push({
        key: `${box.key} ${flow.name} ${flow.mirror}`,
        from: [box.x + nodeWidth, routeY + NODE / 2 + spread(index, flows.length)],
        to: [columns[1], middles.get(flow.name)],
        at: 0.3 + 0.13 * (index % 3),
        text: flow.mirror
          ? mirrorText(route.mirror)
          : flowText(flow.calls_per_second, flow.error_ratio),
        short: `${flow.mirror ? "mirror " : ""}${rate(flow.calls_per_second)}`,
        rate: flow.calls_per_second ?? 0,
        level: flow.error_ratio > 0.01 ? "error" : "ok",
        mirror: flow.mirror,
      });
    });
    routeY += NODE + GAP;
  }
  const height = Math.max(upstreamsBottom, routeY);
  const heads = [
    columnHead("Routes", routes.length, shownRoutes.length, columns[0]),
    columnHead("Upstreams", upstreams.length, shownUpstreams.length, columns[1]),
    { text: "Endpoints", x: columns[2] },
  ];
  weigh(edges);
  placeLabels(edges);
  return { nodes, edges, heads, width, height };
}

/** Lay out in one column, for narrow windows: routes, and below them each upstream's endpoints. */
function layOutNarrow({ routes, upstreams }, width) {
  const nodes = [];
  const edges = [];
  const heads = [];
  let y = 0;
  const head = (text) => {
    heads.push({ text, x: 1, y: y + 13 });
    y += LINE + 4;
  };
  const add = (node, x) => {
    const room = width - 2 - x;
    const characters = Math.floor((room - 20) / 7.2);
    nodes.push({ ...node, x, y, width: room, height: NODE, characters });
    y += NODE + 8;
  };

  const addBelow = (node, top) => {
    const level = node.level === "error" || node.errors > 0.01 ? "error" : "ok";
    const from = [1 + INDENT / 2, top];
    const to = [1 + INDENT, y + NODE / 2];
    const { key, rate: flow, mirror } = node;
    edges.push({ key, from, to, level, mirror, rate: flow ?? 0, bent: true });
    add(node, 1 + INDENT);
  };

  const shownRoutes = firstByRate(routes, MOST_ROUTES);
  head(countedHead("Routes", routes.length, shownRoutes.length));
  for (const route of shownRoutes) {
    const top = y + NODE;
    add(routeNode(route), 1);
    for (const flow of flowNodes(route)) addBelow(flow, top);
    y += 4;
  }
  const shownUpstreams = firstByRate(upstreams, MOST_UPSTREAMS);
  head(countedHead("Upstreams and endpoints", upstreams.length, shownUpstreams.length));
  for (const upstream of shownUpstreams) {
    const top = y + NODE;
    add(upstreamNode(upstream), 1);
    for (const target of endpointNodes(upstream, endpointsEach(shownUpstreams))) {
      const calls = target.rate === null ? "" : `${flowText(target.rate, target.errors)} · `;
      addBelow({ ...target, text: calls + target.text }, top);
    }
    y += 4;
  }
  weigh(edges);
  return { nodes, edges, heads, width, height: y };
}

function weigh(edges) {
  const most = Math.max(...edges.map((edge) => edge.rate), 1e-9);
  for (const edge of edges)
    edge.width = edge.rate > 0 ? 1.5 + 6.5 * Math.sqrt(edge.rate / most) : 1;
}

function routeNode(route) {
  return {
    key: `route ${route.name}`,
    title: route.match || "all calls",
    text: `${flowText(route.calls_per_second, route.error_ratio)} · route ${route.name}`,
    isSentence: true,
    level: flowLevel(route),
  };
}

/** Return where the calls of a route go, as boxes. */
function flowNodes(route) {
  const nodes = route.upstreams.map((each) => ({
    key: `flow ${route.name} ${each.name}`,
    title: `→ ${each.name}`,
    text: flowText(each.calls_per_second, each.error_ratio),
    rate: each.calls_per_second,
    errors: each.error_ratio ?? 0,
    level: flowLevel(each),
  }));
  const { mirror } = route;
  if (mirror) {
    nodes.push({
      key: `mirror ${route.name}`,
      title: `→ ${mirror.upstream}`,
      text: mirrorText(mirror),
      rate: mirror.calls_per_second,
      errors: mirror.error_ratio ?? 0,
      level: flowLevel(mirror),
      mirror: true,
    });
  }
  return nodes;
}

function flowLevel({ error_ratio: errors }) {
  return errors > 0.01 ? "error" : "ok";
}

function upstreamNode(upstream) {
  const { healthy, unreachable_reason: reason } = upstream;
  const isUsable = !reason && healthy !== false;
  const isWhole = !endpointProblems(upstream);
  return {
    key: `upstream ${upstream.name}`,
    title: upstream.name,
    text: upstreamText(upstream),
    isSentence: isUsable,
    level: isUsable ? (isWhole ? "ok" : "warning") : seriousLevel(upstream),
  };
}

function endpointsEach(upstreams) {
  const total = upstreams.reduce((sum, each) => sum + totalEndpoints(each), 0);
  return total <= ALL_ENDPOINTS
    ? ALL_ENDPOINTS
    : Math.max(2, Math.floor(SOME_ENDPOINTS / upstreams.length));
}

/** How far a label may be moved along its edge, and what is tried first. */
const SHIFTS = Array.from(
  { length: 25 },
  (_, step) => (step % 2 ? -1 : 1) * Math.ceil(step / 2) * 0.05,
);

/** Place the labels on their edges, each where it covers none of those before. */
function placeLabels(edges) {
  const taken = [];
  // A level edge has the fewest places.
  const rise = ({ from, to }) => Math.abs(to[1] - from[1]);
  for (const edge of edges.filter((each) => each.text).sort((a, b) => rise(a) - rise(b))) {
    const room = edge.to[0] - edge.from[0];
    const texts = [edge.text, edge.short].filter((text) => text && 2 * halfOf(text) <= room);
    // The tables have what finds no place.
    edge.text = "";
    for (const text of texts) {
      const place = freePlace(edge, halfOf(text), taken);
      if (!place) continue;
      edge.text = text;
      edge.label = [place.x, place.y];
      taken.push(place);
      break;
    }
  }
}

function freePlace(edge, half, taken) {
  return SHIFTS.map((shift) => {
    const [x, y] = pointOn(edge, Math.max(0.05, Math.min(0.95, edge.at + shift)), half);
    return { x, y, half };
  }).find(({ x, y }) =>
    taken.every((other) => Math.abs(x - other.x) > half + other.half || Math.abs(y - other.y) > 14),
  );
}

/** Return half of the width of a label. */
function halfOf(text) {
  return 3.2 * text.length + 4;
}

/** Return a point of an edge, at least `half` away from the boxes at its ends. */
function pointOn({ from, to }, at, half) {
  const back = 1 - at;
  const middle = (from[0] + to[0]) / 2;
  const along = (a, b, c, d) =>
    back ** 3 * a + 3 * back ** 2 * at * b + 3 * back * at ** 2 * c + at ** 3 * d;
  const x = along(from[0], middle, middle, to[0]);
  return [
    Math.max(from[0] + half, Math.min(to[0] - half, x)),
    along(from[1], from[1], to[1], to[1]),
  ];
}

function columnHead(name, all, shown, x) {
  return { text: countedHead(name, all, shown), x };
}

function countedHead(name, all, shown) {
  return all > shown ? `${name}: the ${shown} busiest of ${count(all)}` : name;
}

function firstByRate(list, most) {
  if (list.length <= most) return list;
  const busiest = [...list].sort((a, b) => (b.calls_per_second ?? 0) - (a.calls_per_second ?? 0));
  const chosen = new Set(busiest.slice(0, most));
  return list.filter((each) => chosen.has(each));
}

/** Return endpoints to draw: those with a problem, then the busiest; the others as one. */
function endpointNodes(upstream, most) {
  const total = totalEndpoints(upstream);
  const all = [...upstream.endpoints];
  const chosen =
    total <= most
      ? all
      : all
          .sort(
            (a, b) =>
              severity(a.state) - severity(b.state) ||
              (b.calls_per_second ?? 0) - (a.calls_per_second ?? 0),
          )
          .slice(0, most - 1);
  const nodes = chosen.map((endpoint) => ({
    key: `endpoint ${upstream.name} ${endpoint.url}`,
    title: endpoint.url.replace(/^http:\/\//, ""),
    whole: endpoint.url,
    text: stateSentence(endpoint),
    isSentence: true,
    level: endpointLevel(endpoint.state),
    rate: endpoint.calls_per_second,
    errors:
      endpoint.calls_per_second > 0
        ? (endpoint.failures_per_second ?? 0) / endpoint.calls_per_second
        : 0,
  }));
  const left = total - chosen.length;
  if (left > 0) {
    const drawn = chosen.reduce((sum, each) => sum + (each.calls_per_second ?? 0), 0);
    nodes.push({
      key: `endpoints ${upstream.name}`,
      title: `${count(left)} more endpoints`,
      text: "see the table below",
      level: "ok",
      rate: Math.max(0, (upstream.calls_per_second ?? 0) - drawn),
      errors: 0,
    });
  }
  return nodes;
}

export function stateWord({ state, healthy }) {
  if (healthy && STATES[state]?.[1] === "ok") return "healthy";
  return STATES[state]?.[0] ?? state;
}

export function endpointLevel(state) {
  return STATES[state]?.[1] ?? "unknown";
}

/** Say which copies a mirror gets: "mirror 50 %: 3.1/s, 4 % errors, 2 % got 4xx". */
export function mirrorText(mirror) {
  const share = `mirror ${percent(mirror.percent / 100)}`;
  if (mirror.calls_per_second === undefined) return share;
  const flow = `${share}: ${flowText(mirror.calls_per_second, mirror.error_ratio)}`;
  const { client_error_ratio: rejected } = mirror;
  return rejected > 0 ? `${flow}, ${percent(rejected)} got 4xx` : flow;
}

function upstreamText(upstream) {
  const { healthy, unreachable_reason: reason } = upstream;
  if (reason) return reason;
  const size = plural(totalEndpoints(upstream), "endpoint");
  if (healthy === false) return `no endpoint can be used of ${size}`;
  const problems = endpointProblems(upstream);
  if (problems) return `${problems} of ${size}`;
  return healthy === null ? size : `${size}, healthy`;
}

function flowText(calls, errors) {
  return errors > 0 ? `${rate(calls)}, ${percent(errors)} errors` : rate(calls);
}

function spread(index, total) {
  if (total < 2) return 0;
  const room = Math.min(NODE - 12, 6 * (total - 1));
  return -room / 2 + (room * index) / (total - 1);
}

function createHead() {
  const text = svg("text", { class: "head" });
  return {
    node: text,
    update(head) {
      setText(text, head.text);
      setAttribute(text, "x", head.x);
      setAttribute(text, "y", head.y ?? 13);
    },
  };
}

const MARKS = { ok: "", error: "✖ ", warning: "▲ ", unknown: "? " };

function createNode() {
  const box = svg("rect", { rx: 4 });
  const title = svg("text", { class: "node-title" });
  const text = svg("text", { class: "node-text" });
  const whole = svg("title");
  // It cuts what is wider than the box.
  const inside = svg("svg", {}, title, text);
  const group = svg("g", { class: "node" }, whole, box, inside);
  return {
    node: group,
    update(node) {
      setAttribute(group, "data-level", node.level);
      for (const name of ["x", "y", "width", "height"]) {
        setAttribute(box, name, node[name]);
        setAttribute(inside, name, node[name]);
      }
      place(title, 9, 17);
      place(text, 9, 33);
      setText(title, shortName(node.title, node.characters));
      const shorten = node.isSentence ? beginning : shortName;
      setText(text, shorten(MARKS[node.level] + node.text, Math.floor(node.characters * 1.12)));
      setText(whole, `${node.whole ?? node.title}\n${node.text}`);
    },
  };
}

function createEdge() {
  const path = svg("path", { class: "edge" });
  return {
    node: path,
    update({ from, to, width, level, mirror, bent }) {
      const middle = (from[0] + to[0]) / 2;
      const way = bent
        ? `V${to[1]}H${to[0]}`
        : `C${middle} ${from[1]} ${middle} ${to[1]} ${to}`;
      setAttribute(path, "d", `M${from}${way}`);
      setAttribute(path, "stroke-width", width.toFixed(1));
      setAttribute(path, "data-level", level);
      setAttribute(path, "stroke-dasharray", mirror ? "4 4" : null);
    },
  };
}

function createLabel() {
  const text = svg("text", { class: "edge-text" });
  return {
    node: text,
    update({ label: [x, y], text: label, level }) {
      place(text, x, y + 4);
      setAttribute(text, "data-level", level);
      setText(text, label);
    },
  };
}

function place(node, x, y) {
  setAttribute(node, "x", Math.round(x));
  setAttribute(node, "y", Math.round(y));
}
