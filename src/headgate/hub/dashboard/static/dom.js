// Helpers for the page's nodes. Text of agents is only ever set as text, and a node is only touched if it changes.

export const byId = (id) => document.getElementById(id);

export const figures = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

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
export function element(name, text = "") {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

/** A URL of the hub, also behind a proxy's path prefix. */
export const hubUrl = (path) => new URL(path, document.baseURI);
