// The last hour of an endpoint or a route as charts, which are read anew while they are seen.

import { readJson } from "./api.js";
import { createChart } from "./chart.js";
import { el, setAttribute, setHidden, setText } from "./dom.js";
import * as say from "./format.js";

const REFRESH = 10000;
const LEAST_STEPS = 30;

const CURVES = [
  { name: "Calls", of: "calls_per_second", format: say.rate },
  { name: "Errors", of: "errors_per_second", format: say.rate, kind: "bad" },
  { name: "Duration, p99 (1\u00a0min)", of: "p99_ms", format: say.milliseconds },
];

/** Create the charts of `query`: a route, or an upstream and an endpoint. */
export function createCurves(query) {
  const failure = el("p", { class: "failure" });
  const charts = CURVES.map(({ name, format, kind }) =>
    createChart({ label: name, format, height: 56, tall: true, kind }),
  );
  const node = el(
    "div",
    { class: "tiles curves" },
    ...charts.map((chart, index) =>
      el("div", { class: "tile" }, el("h3", {}, CURVES[index].name), chart.node),
    ),
    failure,
  );
  setHidden(failure, true);

  async function read() {
    try {
      const { history } = await readJson("curves", query);
      setHidden(failure, true);
      const span = Math.max(LEAST_STEPS, history.calls_per_second.length);
      charts.forEach((chart, index) =>
        chart.update(history[CURVES[index].of], {
          end: history.end,
          step: history.step_seconds,
          span,
        }),
      );
    } catch (error) {
      setText(failure, `The curves cannot be read: ${error.message}`);
      setHidden(failure, false);
    }
    setTimeout(readAgain, REFRESH);
  }

  function readAgain() {
    if (!node.isConnected) return;
    const isSeen = node.offsetParent !== null && !document.hidden;
    if (isSeen) read();
    else setTimeout(readAgain, REFRESH);
  }

  read();
  return node;
}

/**
 * Make a row of a table open to its curves. `queryOf()` returns what to read.
 * The entry of a keyedList gets the row below as another node.
 */
export function createCurveToggle(entry, columns, label, queryOf) {
  const toggle = el("button", { type: "button", class: "expand" }, label);
  setAttribute(toggle, "aria-expanded", "false");
  toggle.addEventListener("click", () => {
    const isOpen = entry.nodes.length > 1;
    setAttribute(toggle, "aria-expanded", String(!isOpen));
    if (isOpen) {
      entry.nodes.pop().remove();
      return;
    }
    const cell = el("td", { role: "cell", colspan: columns.length }, createCurves(queryOf()));
    const more = el("tr", { role: "row", class: "more" }, cell);
    entry.nodes[0].after(more);
    entry.nodes.push(more);
  });
  return toggle;
}
