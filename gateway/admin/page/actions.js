// Asks for a token and sends an action. The token stays in this module's memory: a reload forgets it.

import { postAction } from "./api.js";
import { el, nameElement, setHidden, setText } from "./dom.js";

let token = "";

const EFFECTS = {
  drain: "New calls go to other endpoints. Calls in flight finish. Each worker does so, until it is restored.",
  restore: "It takes calls again, as soon as it is healthy.",
};

/** Ask whether to drain or restore an endpoint, and do so. Return whether it was done. */
export function askAndSend(action, upstream, endpoint) {
  const word = action === "drain" ? "Drain" : "Restore";
  const field = el("input", {
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    required: true,
    id: "action-token",
  });
  const failure = el("p", { class: "failure", role: "alert" });
  const confirm = el("button", { type: "submit", class: "primary" }, `${word} it`);
  const cancel = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", { id: "action-title" }, `${word} this endpoint?`),
    el("p", {}, nameElement(endpoint, 80), " of ", nameElement(upstream)),
    el("p", {}, `${EFFECTS[action]} The gateway logs it.`),
    el(
      "p",
      {},
      el("label", { for: "action-token" }, "Token of the admin address"),
      field,
      el("span", { class: "muted" }, "It is kept until this page is reloaded, and nowhere else."),
    ),
    failure,
    el("p", { class: "buttons" }, confirm, cancel),
  );
  const dialog = el("dialog", { "aria-labelledby": "action-title" }, form);
  field.value = token;
  setHidden(failure, true);

  return new Promise((resolve) => {
    let done = false;
    const asked = document.activeElement;
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      confirm.disabled = true;
      token = field.value;
      try {
        await postAction(`endpoints/${action}`, { upstream, endpoint }, token);
        done = true;
        dialog.close();
      } catch (error) {
        if (error.status === 401 || error.status === 403) token = "";
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
    (token ? confirm : field).focus();
  });
}
