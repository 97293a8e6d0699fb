// The panel "Journal": what happened to the gateway and its endpoints, with who and why.

import { choices, dataRow, dataTable, el, filterForm, keyedList, labelled } from "./dom.js";
import { setAttribute, setHidden, setText } from "./dom.js";
import * as say from "./format.js";

const HOUR = 3600;
const RANGES = [
  ["hour", "1 hour"],
  ["all", "the last 1,000"],
];
const REFRESH = 5000;

const COLUMNS = [
  { label: "Time" },
  { label: "Event" },
  { label: "Of" },
  { label: "By" },
  { label: "Why" },
];

export function createJournal() {
  const search = el("input", { type: "search", id: "journal-search", autocomplete: "off" });
  const note = el("p", { class: "muted summary" });
  const nothing = el("p", { class: "empty" });
  const table = dataTable("Events, newest first", COLUMNS, { class: "journal wide" });
  const render = keyedList(table.body, (event) => event.id, createEvent);
  let range = "hour";
  let latest = null;
  setHidden(nothing, true);
  search.addEventListener("input", show);
  // Events leave the last hour although nothing new happens.
  setInterval(show, REFRESH);

  function show() {
    if (!latest) return;
    const text = search.value.trim().toLowerCase();
    const since = range === "hour" ? Date.now() / 1000 - HOUR : 0;
    const shown = latest.events.filter(
      (event) => event.time >= since && (!text || wordsOf(event).includes(text)),
    );
    render(shown);
    setHidden(table.node, shown.length === 0);
    setHidden(nothing, shown.length > 0);
    setText(
      nothing,
      text
        ? "No event has this text."
        : range === "hour" && latest.kept
          ? "Nothing happened in the last hour."
          : "Nothing has happened yet.",
    );
    const kept = say.plural(latest.kept, "event");
    setText(note, `${say.count(shown.length)} of ${kept}. The gateway keeps the last 1,000.`);
  }

  const ranges = choices("Events of", RANGES, range, (chosen) => {
    range = chosen;
    show();
  });
  return {
    id: "journal",
    title: "Journal",
    node: el(
      "div",
      {},
      filterForm("Events", ranges, labelled("Any text has", search), note),
      nothing,
      table.node,
    ),
    topics: () => ({ journal: {} }),
    show() {},
    hide() {},
    update(topic, document) {
      if (topic !== "journal") return;
      latest = document;
      show();
    },
  };
}

function wordsOf({ event, subject, who, why }) {
  return `${event} ${subject} ${who} ${why}`.toLowerCase();
}

function createEvent() {
  const [time, state, who, why] = ["span", "strong", "span", "span"].map((tag) => el(tag));
  const subject = el("a", { dir: "auto" });
  setAttribute(state, "class", "state");
  setAttribute(why, "dir", "auto");
  const row = dataRow(COLUMNS, [time, state, subject, who, why]);
  return {
    node: row,
    update(event) {
      const level = event.level === "info" ? "ok" : event.level;
      setText(time, say.clock(event.time));
      setText(state, event.event);
      setAttribute(state, "data-level", level);
      setAttribute(row, "data-level", level === "ok" ? null : level);
      setText(subject, event.subject || "the gateway");
      setAttribute(subject, "href", linkOf(event));
      setText(who, event.who || say.UNKNOWN);
      setText(why, event.why);
    },
  };
}

function linkOf({ upstream, endpoint }) {
  if (!upstream) return null;
  const query = new URLSearchParams(endpoint ? { upstream, search: endpoint } : { upstream });
  return `#topology?${query}`;
}
