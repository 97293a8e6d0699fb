// Reads the JSON documents of the gateway, and keeps a stream of server-sent events.
// All addresses are relative, so the page works behind a path prefix.

const READ_TIMEOUT = 15000;
const SILENCE = 6000; // the stream has an event each second
const PATIENCE = 1500; // for a document, when there is no stream
const FIRST_PAUSE = 1000;
const LONGEST_PAUSE = 8000;

/** An error that the gateway explains, or one of the connection. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Return a query of those parameters that have a value. */
export function query(parameters) {
  const given = Object.entries(parameters).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined && value !== false,
  );
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text && `?${text}`;
}

export async function readJson(path, parameters = {}) {
  return send(`api/${path}${query(parameters)}`, { headers: { Accept: "application/json" } });
}

/** Send an action. The API key goes in a header, so no log or history has it. */
export async function postAction(path, body, apiKey, timeout = READ_TIMEOUT) {
  const options = {
    method: "POST",
    headers: { Authorization: `Bearer ${apiKey}`, "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  return send(`api/${path}`, options, timeout);
}

async function send(url, options, timeout = READ_TIMEOUT) {
  let response;
  try {
    response = await fetch(url, {
      ...options,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
      signal: AbortSignal.timeout(timeout),
    });
  } catch (error) {
    const late = error instanceof DOMException && error.name === "TimeoutError";
    throw new ApiError(late ? "the gateway does not respond" : "the gateway cannot be reached");
  }
  const text = await response.text().catch(() => "");
  const document = parsed(text);
  if (!response.ok) {
    const said = document?.error ?? text.slice(0, 200);
    throw new ApiError(said || `the gateway returned ${response.status}`, response.status);
  }
  if (document === undefined) throw new ApiError("the response is not JSON", response.status);
  return document;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/**
 * The live stream. `onDocument(topic, document)` gets each document; `onState(state, error)` is called
 * with "live", "polling", "broken" or "paused"; `onOpen()` when a stream begins, again after a break too.
 */
export class LiveStream {
  #source = null;
  #topics = [];
  #parameters = {};
  #timer = null;
  #pause = FIRST_PAUSE;
  #openedAt = 0;
  #lastEvent = 0;
  #polling = false;

  constructor({ onDocument, onState, onOpen }) {
    this.onDocument = onDocument;
    this.onState = onState;
    this.onOpen = onOpen;
    document.addEventListener("visibilitychange", () => this.#visibilityChanged());
    setInterval(() => this.#watch(), 1000);
  }

  /** Follow these topics; `parameters` are by topic. Nothing happens if they are those of before. */
  follow(topics, parameters) {
    const wanted = JSON.stringify([topics, parameters]);
    if (wanted === JSON.stringify([this.#topics, this.#parameters]) && this.#source) return;
    this.#topics = topics;
    this.#parameters = parameters;
    this.#pause = FIRST_PAUSE;
    this.#open();
  }

  #open() {
    this.#close();
    if (document.hidden) {
      this.onState("paused");
      return;
    }
    const wanted = { topics: this.#topics.join(",") };
    for (const [topic, values] of Object.entries(this.#parameters)) {
      for (const [name, value] of Object.entries(values)) wanted[`${topic}.${name}`] = value;
    }
    const source = new EventSource(`api/events${query(wanted)}`);
    this.#source = source;
    this.#openedAt = performance.now();
    this.#lastEvent = 0;
    source.addEventListener("open", () => {
      this.#openedAt = performance.now();
      this.onOpen();
    });
    source.addEventListener("end", () => this.#broken(source));
    source.addEventListener("error", () => this.#broken(source));
    for (const topic of this.#topics) {
      source.addEventListener(topic, (event) => this.#received(topic, event.data));
    }
  }

  #received(topic, data) {
    this.#lastEvent = performance.now();
    this.#pause = FIRST_PAUSE;
    const document = parsed(data);
    if (document === undefined) return;
    this.onState("live");
    this.onDocument(topic, document);
  }

  #close() {
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#source?.close();
    this.#source = null;
  }

  // The browser tries again by itself after a break, but not after an error status. So the page does.
  #broken(source) {
    if (source !== this.#source) return;
    this.#close();
    this.#timer = setTimeout(() => this.#open(), this.#pause);
    this.#pause = Math.min(LONGEST_PAUSE, 1.6 * this.#pause);
    this.#poll();
  }

  #visibilityChanged() {
    if (document.hidden) {
      this.#close();
      this.onState("paused");
    } else if (this.#topics.length) this.#open();
  }

  // A proxy may buffer events, and a sleeping computer may hold a dead connection.
  #watch() {
    if (!this.#source || document.hidden) return;
    const now = performance.now();
    if (this.#lastEvent && now - this.#lastEvent > SILENCE) this.#broken(this.#source);
    else if (!this.#lastEvent && now - this.#openedAt > SILENCE) this.#poll();
  }

  // Without a stream, the page reads the documents themselves. If that fails too, nobody is there.
  async #poll() {
    if (this.#polling) return;
    this.#polling = true;
    const isLive = () => this.#source && this.#lastEvent;
    const fail = (error) => isLive() || document.hidden || this.onState("broken", error);
    const late = setTimeout(fail, PATIENCE);
    try {
      for (const topic of this.#topics) {
        const found = await readJson(topic, this.#parameters[topic] ?? {});
        clearTimeout(late);
        if (isLive() || document.hidden) return;
        this.onState("polling");
        this.onDocument(topic, found);
      }
    } catch (error) {
      fail(error);
    } finally {
      clearTimeout(late);
      this.#polling = false;
    }
  }
}
