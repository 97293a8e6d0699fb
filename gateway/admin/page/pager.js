// Pages of a long list: where it stands, and links to the pages before and after.

import { el, setHidden, setText } from "./dom.js";
import { count } from "./format.js";

export function createPager(noun, go) {
  const where = el("span");
  let offset = 0;
  let limit = 1;
  const before = el(
    "button",
    { type: "button", onclick: () => go(Math.max(0, offset - limit)) },
    "Previous",
  );
  const after = el("button", { type: "button", onclick: () => go(offset + limit) }, "Next");
  return {
    node: el("span", { class: "pager" }, where, before, after),
    /** Show that `here` entries are shown from `offset`, of `total`. */
    update({ offset: from, here, total, limit: most }) {
      offset = from;
      limit = most;
      const whole = from === 0 && here >= total;
      setText(
        where,
        whole || here === 0
          ? `${count(here)} ${noun}`
          : `${noun} ${count(from + 1)} to ${count(from + here)} of ${count(total)}`,
      );
      setHidden(before, whole && from === 0);
      setHidden(after, whole);
      before.disabled = from === 0;
      after.disabled = here < most;
    },
  };
}
