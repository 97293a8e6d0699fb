// Builds and updates elements. All text is set as text, never as HTML, so no name can become markup.

const SVG = "http://www.w3.org/2000/svg";

// Characters that are invisible or that turn the direction of text: a name must not look like another.
const DECEPTIVE = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b-\\u200f\\u2028-\\u202e" +
    "\\u2060-\\u2069\\ufeff]",
  "g",
);

/** Return a text with each invisible character, but for lines and tabs, as its code point. */
export function plainText(text) {
  return String(text).replace(DECEPTIVE, (character) => {
    const code = character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
    return `⟨U+${code}⟩`;
  });
}

/** Create an HTML element. Attributes that are functions, as `onclick`, become listeners. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else setAttribute(node, name, value);
  }
  const given = children.filter((child) => child !== null && child !== undefined);
  node.append(...given.map((child) => (child instanceof Node ? child : plainText(child))));
  return node;
}

/** Set an attribute if it differs; null and false remove it. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : name === "href" || name === "value" ? value : plainText(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

/** Set the text of an element if it differs, which keeps a selection in it. */
export function setText(node, text) {
  const wanted = plainText(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Set a text of parts with commas between, none of which is broken. */
export function setParts(node, text) {
  if (node.textContent === plainText(text)) return;
  const parts = text.split(", ").map((part) => el("span", { class: "unbroken" }, part));
  node.replaceChildren(...parts.flatMap((part, index) => (index ? [", ", part] : [part])));
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden;
}

/** Return a name of at most so many characters: the begin and the end of a longer one. */
export function shortName(name, most) {
  const characters = Array.from(plainText(name));
  if (characters.length <= most) return characters.join("");
  const tail = Math.floor(most / 3);
  const head = most - tail - 1;
  return `${characters.slice(0, head).join("")}…${characters.slice(-tail).join("")}`;
}

/** Return a sentence of at most so many characters: the begin of a longer one. */
export function beginning(sentence, most) {
  const characters = Array.from(plainText(sentence));
  return characters.length <= most
    ? characters.join("")
    : `${characters.slice(0, most - 1).join("").trimEnd()}…`;
}

const namesShown = new WeakMap();
/** Characters of a host and port that stand in one line. */
const MOST_UNBROKEN = 28;

/** Create an element for a name that the gateway does not choose: isolated, and cut if it is long. */
export function nameElement(name = "", most = 48) {
  const node = el("bdi", { dir: "auto", class: "name" });
  setName(node, name, most);
  return node;
}

export function setName(node, name, most = 48) {
  const shown = namesShown.get(node);
  if (shown?.name === name && shown.most === most) return;
  namesShown.set(node, { name, most });
  const short = shortName(name, most);
  setText(node, short);
  setAttribute(node, "title", short === name ? null : plainText(name));
}

/** Create an element for a server's URL, whose host and port are not broken. */
export function addressElement() {
  return el("bdi", { dir: "ltr", class: "name" });
}

export function setAddress(node, url, most = 60) {
  const shown = namesShown.get(node);
  if (shown?.name === url) return;
  namesShown.set(node, { name: url, most });
  const short = shortName(url, most);
  const [, scheme, rest] = /^([a-z]+:\/\/)?(.*)$/s.exec(short);
  const isShort = rest.length <= MOST_UNBROKEN;
  node.replaceChildren(
    plainText(scheme ?? ""),
    el("wbr"),
    el("span", { class: isShort ? "unbroken" : null }, rest),
  );
  setAttribute(node, "title", short === url ? null : plainText(url));
}

/**
 * Return a function that shows a list in `parent`, one element per key.
 * `create(item)` returns `{node, update}`. Elements stay those of before, in focus and selection too.
 */
export function keyedList(parent, keyOf, create) {
  let shown = new Map();
  return (items) => {
    const next = new Map();
    for (const item of items) {
      const key = keyOf(item);
      if (next.has(key)) continue;
      const entry = shown.get(key) ?? create(item);
      entry.update(item);
      next.set(key, entry);
    }
    const focused = document.activeElement;
    for (const [key, entry] of shown) if (!next.has(key)) removeNodes(entry);
    let place = parent.firstChild;
    for (const entry of next.values()) {
      for (const node of nodesOf(entry)) {
        if (node === place) place = place.nextSibling;
        else parent.insertBefore(node, place);
      }
    }
    shown = next;
    // An element that moves loses the focus.
    if (focused !== document.activeElement && focused?.isConnected) {
      focused.focus({ preventScroll: true });
    }
  };
}

function nodesOf(entry) {
  return entry.nodes ?? [entry.node];
}

function removeNodes(entry) {
  for (const node of nodesOf(entry)) node.remove();
}

/**
 * Create a table. Its roles are said aloud, as narrow windows show rows as blocks,
 * which would otherwise be no table for a screen reader.
 */
export function dataTable(caption, columns, attributes = {}) {
  const body = el("tbody", { role: "rowgroup" });
  const captionNode = el("caption", {}, caption);
  const head = columns.map((column) =>
    el(
      "th",
      { scope: "col", role: "columnheader", class: columnClass(column) },
      column.hidden ? el("span", { class: "hidden-text" }, column.label) : column.label,
    ),
  );
  const node = el(
    "table",
    { ...attributes, role: "table", class: `rows ${attributes.class ?? ""}` },
    captionNode,
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)),
    body,
  );
  return { node, body, caption: captionNode };
}

function columnClass({ numeric, name }) {
  return [numeric && "number", name].filter(Boolean).join(" ") || null;
}

/** Create a row for `columns`; the first cell is the row's header. */
export function dataRow(columns, cells, attributes = {}) {
  const nodes = cells.map((content, index) => {
    const column = columns[index];
    const shared = { "data-label": column.label, class: columnClass(column) };
    const inner = el("div", { class: "cell" }, ...(Array.isArray(content) ? content : [content]));
    return index === 0
      ? el("th", { ...shared, scope: "row", role: "rowheader" }, inner)
      : el("td", { ...shared, role: "cell" }, inner);
  });
  return el("tr", { ...attributes, role: "row" }, ...nodes);
}

/** Create a form's field with its label before it. */
export function labelled(label, field) {
  return el("span", { class: "field" }, el("label", { for: field.id }, label), field);
}

/** Create the form of a panel's filters, which apply as they change. */
export function filterForm(label, ...children) {
  const submit = (event) => event.preventDefault();
  return el(
    "form",
    { class: "filters", role: "search", "aria-label": label, onsubmit: submit },
    ...children,
  );
}

/** Set the options of a choice, as [value, text]; what was chosen stays if it can. */
export function setOptions(select, options) {
  const before = select.value;
  select.replaceChildren(...options.map(([value, text]) => el("option", { value }, text)));
  if (options.some(([value]) => value === before)) select.value = before;
}

/** Create buttons of which one is chosen; `onChoose(value)` is called with another one. */
export function choices(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) => {
    const button = el("button", { type: "button", onclick: () => choose(value) }, text);
    return { value, button };
  });
  const choose = (value) => {
    show(value);
    onChoose(value);
  };
  const show = (wanted) => {
    for (const { value, button } of buttons) {
      setAttribute(button, "aria-pressed", String(value === wanted));
    }
  };
  show(chosen);
  return el(
    "div",
    { class: "choices", role: "group", "aria-label": label },
    ...buttons.map(({ button }) => button),
  );
}

/** Create a table of facts: a name and a value in each row. */
export function factTable(caption) {
  const body = el("tbody");
  const node = el(
    "table",
    { class: "facts" },
    el("caption", { class: "hidden-text" }, caption),
    body,
  );
  const values = new Map();
  return {
    node,
    /** Show rows of [name, text or element]. */
    show(rows) {
      const wanted = new Set(rows.map(([name]) => name));
      for (const [name, { row }] of values) {
        if (!wanted.has(name)) {
          row.remove();
          values.delete(name);
        }
      }
      for (const [name, value] of rows) {
        let entry = values.get(name);
        if (!entry) {
          const cell = el("td");
          entry = { cell, row: el("tr", {}, el("th", { scope: "row" }, name), cell) };
          values.set(name, entry);
          body.append(entry.row);
        }
        if (value instanceof Node) {
          if (entry.cell.firstChild !== value) entry.cell.replaceChildren(value);
        } else setText(entry.cell, value);
      }
    },
  };
}
