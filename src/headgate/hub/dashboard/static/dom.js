// The page's nodes. Whatever agents have named goes in as text; a node that says it already is left alone.

export const one = (id) => document.getElementById(id);

export const figures = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

export function show(node, wanted) {
  if (node.hidden === wanted) node.hidden = !wanted;
}

/** A new node from the template with this id. */
export function made(id) {
  return one(id).content.firstElementChild.cloneNode(true);
}

/** A new node with text in it. */
export function element(name, text = "") {
  const node = document.createElement(name);
  node.textContent = text;
  return node;
}

/** Where something of the hub's is, also below the path of a proxy. */
export const where = (path) => new URL(path, document.baseURI);
