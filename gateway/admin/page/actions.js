// Asks for an API key and sends an action. The key stays in this module's memory: a reload forgets it.

import { postAction } from "./api.js";
import { el, labelled, nameElement, setHidden, setText } from "./dom.js";

let apiKey = "";

const EFFECTS = {
  drain:
    "New calls go to other endpoints. Calls in flight finish. This lasts until it is restored.",
  restore: "It takes calls again, as soon as it is healthy.",
};

/** Ask whether to drain or restore an endpoint, and do so. Return whether it was done. */
export function changeEndpoint(action, upstream, endpoint) {
  const word = action === "drain" ? "Drain" : "Restore";
  return ask({
    title: `${word} this endpoint?`,
    word: `${word} it`,
    content: [
      el("p", {}, nameElement(endpoint, 80), " of ", nameElement(upstream)),
      el("p", {}, EFFECTS[action]),
    ],
    send: () => postAction(`endpoints/${action}`, { upstream, endpoint }, apiKey),
  });
}

/** Ask for new trace settings of a model, and send those that differ. Return whether it was done. */
export function changeTraceSettings(name, settings) {
  const fields = Object.entries(settings).map(([setting, value], index) => {
    const field = el("input", { type: "text", id: `trace-${index}`, autocomplete: "off" });
    field.value = settingText(value);
    return { setting, value, field };
  });
  return ask({
    title: "Change the trace settings?",
    word: "Change them",
    content: [
      el(
        "p",
        {},
        "Of the model ",
        nameElement(name, 80),
        ", at its servers. An empty one is reset.",
      ),
      ...fields.map(({ setting, field }) => el("p", {}, labelled(setting, field))),
    ],
    send() {
      const changed = fields.filter(({ value, field }) => field.value !== settingText(value));
      if (!changed.length) throw new Error("nothing has been changed");
      const wanted = changed.map(({ setting, value, field }) => [
        setting,
        parsed(field.value, value),
      ]);
      return postAction("model/trace", { name, settings: Object.fromEntries(wanted) }, apiKey);
    },
  });
}

/**
 * Send with the API key; ask for it if there is none, or if it is wrong.
 * Return what `send(key)` returns, or null if nobody gave a key.
 */
export async function sendWithKey(send) {
  let failure = "";
  for (;;) {
    if (!apiKey && !(await askForKey(failure))) return null;
    try {
      return await send(apiKey);
    } catch (error) {
      if (error.status !== 401) throw error;
      apiKey = "";
      failure = `Not sent: ${error.message}`;
    }
  }
}

function askForKey(failure) {
  return ask({ title: "Send this call?", word: "Send it", content: [], failure, send() {} });
}

export function settingText(value) {
  if (Array.isArray(value)) return value.join(", ");
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Return a setting's new value: a list where it was one, null for nothing. */
function parsed(text, before) {
  if (!text.trim()) return null;
  if (!Array.isArray(before)) return text.trim();
  return text
    .split(",")
    .map((part) => part.trim())
    .filter(Boolean);
}

/** Show a dialog with a field for the API key; return whether `send` was done. */
function ask({ title, word, content, failure: before = "", send }) {
  const field = el("input", {
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    id: "action-key",
  });
  const failure = el("p", { class: "failure", role: "alert" }, before);
  const confirm = el("button", { type: "submit", class: "primary" }, word);
  const cancel = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", { id: "action-title" }, title),
    ...content,
    el(
      "p",
      {},
      labelled("API key", field),
      el(
        "span",
        { class: "muted" },
        "One of the group in admin.keys. The page forgets it when it is reloaded.",
      ),
    ),
    el("p", { class: "muted" }, "The gateway logs this."),
    failure,
    el("p", { class: "buttons" }, confirm, cancel),
  );
  const dialog = el("dialog", { "aria-labelledby": "action-title" }, form);
  field.value = apiKey;
  setHidden(failure, !before);

  return new Promise((resolve) => {
    let done = false;
    const asked = document.activeElement;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      apiKey = field.value;
      try {
        await send();
        done = true;
        dialog.close();
      } catch (error) {
        if (error.status === 401) apiKey = "";
        setHidden(failure, false);
        setText(failure, `Not done: ${error.message}`);
        confirm.disabled = false;
        field.focus();
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (asked?.isConnected) asked.focus();
      resolve(done);
    });
    document.body.append(dialog);
    dialog.showModal();
    (apiKey ? confirm : field).focus();
  });
}
