// What the user has chosen to see, kept in the fragment of the address, which no server sees.

import { FILTERS, ORDERS } from "./orders.js";

const LISTS = ["table", "cards"];

/** The fragment of an agent's page. */
export const agentLink = (name) => `#${new URLSearchParams({ agent: name })}`;

/** The fragment of the list, with the accounts of a path. */
export const accountLink = (path) => `#${new URLSearchParams({ account: path })}`;

/** The view in a fragment. `token` is there if the fragment is that of a link to sign in. */
export function readView(fragment) {
  const given = new URLSearchParams(fragment.slice(1));
  const known = (name, values, otherwise) => (values.includes(given.get(name)) ? given.get(name) : otherwise);
  const sorts = Object.keys(ORDERS);
  return {
    agent: given.get("agent") ?? "",
    search: given.get("search") ?? "",
    account: given.get("account") ?? "", // part of a path
    show: known("show", Object.keys(FILTERS), "all"),
    sort: known("sort", [...sorts, ...sorts.map((name) => `-${name}`)], "urgency"), // -: the other way round
    list: known("list", LISTS, ""), // "": by the number of agents
    token: given.get("token") ?? "",
  };
}

/** The fragment of the list in a view. */
export function listLink({ account, search, show, sort, list }) {
  const wanted = new URLSearchParams();
  if (account) wanted.set("account", account);
  if (search) wanted.set("search", search);
  if (show !== "all") wanted.set("show", show);
  if (sort !== "urgency") wanted.set("sort", sort);
  if (list) wanted.set("list", list);
  return wanted.size ? `#${wanted}` : "";
}
