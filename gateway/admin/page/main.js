// Starts the page: chooses the panel by the address's hash, follows the stream, shows the connection.

import { LiveStream, readJson } from "./api.js";
import { createCalls } from "./calls.js";
import { el, keyedList, setAttribute, setHidden, setText } from "./dom.js";
import { clock, plural, seconds } from "./format.js";
import { createJournal } from "./journal.js";
import { createModels } from "./models.js";
import { createOverview, problemKey } from "./overview.js";
import { createTopology } from "./topology.js";
import { createTryIt } from "./try_it.js";

const SPOKEN_PROBLEMS = 3;

const context = { navigate, announce, refollow: () => followPanel() };
/** The panels in their order. A further one takes an entry here, with the same functions. */
const creators = [
  createOverview,
  createTopology,
  createModels,
  createCalls,
  createJournal,
  createTryIt,
];
const panels = creators.map((create) => create(context));
const byId = Object.fromEntries(panels.map((panel) => [panel.id, panel]));

const find = (id) => document.getElementById(id);
const main = find("main");
let current = null;
let firstVersion = null;
let brokenSince = null;
let knownProblems = null;

const links = new Map();
for (const panel of panels) {
  panel.heading = el("h1", { tabindex: "-1" }, panel.title);
  panel.section = el(
    "section",
    { id: `panel-${panel.id}`, class: "panel" },
    panel.heading,
    panel.node,
  );
  setHidden(panel.section, true);
  main.append(panel.section);
  const badge = el("span", { class: "badge" });
  setHidden(badge, true);
  const link = el("a", { href: `#${panel.id}` }, panel.title, badge);
  links.set(panel.id, { link, badge });
  find("panels").append(el("li", {}, link));
}

const live = new LiveStream({
  onDocument(topic, document) {
    if (topic === "overview") updateShell(document);
    current?.update(topic, document);
  },
  onState: showConnection,
  onOpen: () => current?.reconnected?.(),
});

/** Go to a panel with parameters. Changes of filters replace the entry of the history. */
function navigate(id, parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== 0);
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  history.replaceState(null, "", `#${id}${text && `?${text}`}`);
  route();
}

function readHash() {
  const [id, text = ""] = splitOnce(location.hash.slice(1), "?");
  const parameters = Object.fromEntries(new URLSearchParams(text));
  return { panel: byId[id] ?? panels[0], parameters };
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function route() {
  const { panel, parameters } = readHash();
  const changed = panel !== current;
  if (changed) {
    current?.hide();
    if (current) setHidden(current.section, true);
    setHidden(panel.section, false);
    for (const [id, { link }] of links)
      setAttribute(link, "aria-current", id === panel.id ? "page" : null);
  }
  const first = current === null;
  current = panel;
  panel.show(parameters);
  followPanel();
  if (changed && !first) {
    window.scrollTo(0, 0);
    panel.heading.focus({ preventScroll: true });
  }
  showTitle();
  if (changed || !first) readNow(panel);
}

let reading = 0;

/** Show a panel at once, without waiting for the next event. */
async function readNow(panel) {
  const ticket = ++reading;
  const topics = { overview: {}, ...panel.topics() };
  for (const [topic, parameters] of Object.entries(topics)) {
    if (topic === "calls") continue;
    try {
      const document = await readJson(topic, parameters);
      if (ticket !== reading) return;
      if (topic === "overview") updateShell(document);
      panel.update(topic, document);
    } catch {
      // The stream's state tells whether there is a connection.
    }
  }
}

// The overview is in each stream: the shell shows its problems and the version.
function followPanel() {
  const topics = current.topics();
  live.follow(["overview", ...Object.keys(topics)], topics);
}

function updateShell(overview) {
  const { version, build, problems } = overview;
  setText(find("version"), `${version}, ${build}`);
  firstVersion ??= version;
  showNotices({
    draining: overview.draining,
    newVersion: version === firstVersion ? null : version,
  });
  for (const [id, { badge }] of links) {
    const found = problems.filter(({ panel }) => id === "overview" || id === panel);
    const hasError = found.some(({ level }) => level === "error");
    setHidden(badge, found.length === 0);
    setText(badge, found.length);
    setAttribute(badge, "data-level", hasError ? "error" : "warning");
    setAttribute(badge, "aria-label", plural(found.length, hasError ? "problem" : "warning"));
    setAttribute(badge, "role", "img");
  }
  sayNewProblems(problems);
  problemCount = problems.length;
  showTitle();
}

let problemCount = 0;

function showTitle() {
  const trouble = problemCount ? `(${problemCount}) ` : "";
  const wanted = `${trouble}${current.title} – Tensorgate`;
  if (document.title !== wanted) document.title = wanted;
}

/** Say new problems to a screen reader, each once; those of the beginning are text to read. */
function sayNewProblems(problems) {
  const keys = new Set(problems.map(problemKey));
  if (knownProblems) {
    const fresh = problems.filter((problem) => !knownProblems.has(problemKey(problem)));
    const solved = knownProblems.size > 0 && keys.size === 0;
    if (solved) announce("Nothing is wrong any more.");
    else if (fresh.length) {
      const spoken = fresh.slice(0, SPOKEN_PROBLEMS).map((problem) => problem.text.slice(0, 300));
      const left = fresh.length - spoken.length;
      if (left > 0) spoken.push(`${left} more new problems.`);
      announce(spoken.join(" "));
    }
  }
  knownProblems = keys;
}

function announce(text) {
  const region = find("announcements");
  // The same text again would not be said.
  region.textContent = "";
  setTimeout(() => {
    setText(region, text);
  }, 50);
}

const notices = find("notices");
let shownNotices = { draining: false, newVersion: null, broken: null, refusal: null };
const renderNotices = keyedList(
  notices,
  (notice) => notice.key,
  () => {
    const text = el("span");
    const reload = el("button", { type: "button", onclick: () => location.reload() }, "Reload");
    const node = el("p", { class: "notice" }, text, reload);
    return {
      node,
      update(notice) {
        setAttribute(node, "data-level", notice.level);
        setText(text, notice.text);
        setHidden(reload, !notice.reload);
      },
    };
  },
);

function showNotices(changes) {
  shownNotices = { ...shownNotices, ...changes };
  const { draining, newVersion, broken, refusal } = shownNotices;
  const list = [];
  if (broken) {
    const reason = refusal
      ? `The gateway refuses: ${refusal}.`
      : "The page shows what was then, and tries again.";
    list.push({ key: "broken", level: "error", text: `Not connected since ${broken}. ${reason}` });
  }
  if (draining)
    list.push({
      key: "draining",
      level: "warning",
      text: "The gateway drains: it finishes its calls, then it stops.",
    });
  if (newVersion) {
    list.push({
      key: "version",
      level: "warning",
      text: `This page is of version ${firstVersion}, the gateway of ${newVersion}.`,
      reload: true,
    });
  }
  renderNotices(list);
}

const connection = find("connection");
let connectionState = "connecting";

function showConnection(state, error = null) {
  if (state === "broken") brokenSince ??= Date.now() / 1000;
  else if (state !== "paused") brokenSince = null;
  connectionState = state;
  const hasBroken = brokenSince !== null;
  setAttribute(connection, "data-state", hasBroken ? "broken" : state);
  showConnectionText();
  setAttribute(document.body, "data-stale", hasBroken ? "yes" : null);
  showNotices({
    broken: hasBroken ? clock(brokenSince) : null,
    refusal: error?.status ? error.message : null,
  });
}

function showConnectionText() {
  const text = {
    connecting: "Connecting",
    live: "Live",
    polling: "Polling: there is no stream of events",
    paused: "Paused while hidden",
  }[connectionState];
  const since = brokenSince === null ? 0 : Date.now() / 1000 - brokenSince;
  setText(
    connection.firstElementChild,
    brokenSince === null ? text : `Not connected for ${seconds(Math.floor(since))}`,
  );
}
setInterval(showConnectionText, 1000);

// The theme may outlive the tab: it is no secret.
const theme = find("theme");
function applyTheme(value) {
  setAttribute(document.documentElement, "data-theme", value || null);
}
try {
  theme.value = localStorage.getItem("theme") ?? "";
} catch {
  // A browser may forbid storage.
}
applyTheme(theme.value);
theme.addEventListener("change", () => {
  applyTheme(theme.value);
  try {
    localStorage.setItem("theme", theme.value);
  } catch {
    // The choice then lasts as long as the page.
  }
});

// The skip link must not change the hash, which names the panel.
find("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

addEventListener("hashchange", route);
route();
