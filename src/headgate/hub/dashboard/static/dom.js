// Helpers for the page's nodes. Text of agents is only ever set as text, and a node is only touched if it changes.

export const byId = (id) => document.getElementById(id);

export const figures = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

const times = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const days = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const dates = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });

/** The time of day of a moment in seconds since 1970, with the day unless it is today, and the year unless it is this. */
export function timeText(seconds) {
  const [moment, now] = [new Date(seconds * 1000), new Date()];
  if (moment.toDateString() === now.toDateString()) return times.format(moment);
  return `${(moment.getFullYear() === now.getFullYear() ? days : dates).format(moment)}, ${times.format(moment)}`;
}

/** Something per second, in few digits. */
export const rateText = (rate) => (rate > 0 && rate < 0.1 ? rate.toFixed(2) : figures.format(rate));

const SPANS = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];

/** A span of time: in seconds, from 100 of them on in its two largest units. */
export function spanText(seconds) {
  if (seconds < 100) return `${figures.format(seconds)} s`;
  const whole = Math.ceil(seconds);
  const at = SPANS.findIndex(([size]) => whole >= size);
  const [[size, unit], [small, smallUnit]] = SPANS.slice(at, at + 2);
  const below = Math.floor((whole % size) / small);
  return `${figures.format(Math.floor(whole / size))} ${unit}${below ? ` ${below} ${smallUnit}` : ""}`;
}

export const plural = (many, one) => `${figures.format(many)} ${one}${many === 1 ? "" : "s"}`;

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function setVisible(node, wanted) {
  if (node.hidden === wanted) node.hidden = !wanted;
}

/** A new node from the template with this id. */
export function fromTemplate(id) {
  return byId(id).content.firstElementChild.cloneNode(true);
}

/** A new node with text in it. */
export function element(name, text = "", className = "") {
  const node = document.createElement(name);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

/** Make `nodes` the children of a parent, in this order. Only those that change places are moved. */
export function placeChildren(parent, nodes) {
  const [wanted, focused] = [new Set(nodes), document.activeElement];
  for (const node of [...parent.children]) if (!wanted.has(node)) node.remove();
  let next = parent.firstElementChild;
  for (const node of nodes) {
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  }
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
}

/** Give a parent this many children; `make` makes those that are missing. */
export function setCount(parent, many, make) {
  while (parent.children.length > many) parent.lastElementChild.remove();
  while (parent.children.length < many) parent.append(make());
}

/** Fill the body of a table with rows of texts. Only cells that change are touched. */
export function fillRows(body, rows) {
  setCount(body, rows.length, () => element("tr"));
  rows.forEach((texts, at) => {
    const row = body.rows[at];
    texts.forEach((text, place) => setText(row.cells[place] ?? row.insertCell(), text));
  });
}

/** A URL of the hub, also behind a proxy's path prefix. */
export const hubUrl = (path) => new URL(path, document.baseURI);
