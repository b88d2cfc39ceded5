// Filters and orders of the agents.

import { stateOf } from "./state.js";

export const FILTERS = {
  all: () => true,
  connected: (agent) => agent.connected,
  limited: (agent) => agent.rate_limited,
  violations: (agent) => agent.violations > 0 || agent.violations_last_hour > 0,
  blocked: (agent) => agent.blocked,
  override: (agent) => agent.override,
  exempt: (agent) => agent.exempt,
};

const used = (agent) => agent.usage?.used ?? -1;

/** For each order the keys of an agent, the smallest first. */
export const ORDERS = {
  urgency: (agent) => [agent.rate_limited ? 0 : 1, -(agent.denied_per_minute ?? 0), -used(agent)],
  name: () => [],
  state: (agent) => [stateOf(agent)],
  usage: (agent) => [-used(agent)],
  rate: (agent, agents) => [-agents.rate(agent)],
  denied: (agent) => [-(agent.denied_per_minute ?? 0)],
  violations: (agent) => [-agent.violations_last_hour, -agent.violations],
  wait: (agent) => [-agent.wait],
};

/** Whether a search finds an agent: by a part of its name, or by the whole name in quotes. */
export function finds(search, name) {
  if (/^".+"$/.test(search)) return name === search.slice(1, -1);
  return name.toLowerCase().includes(search.toLowerCase());
}

/** The given agents in an order, those that are alike by name. */
export function sorted(given, order, agents) {
  const reverse = order.startsWith("-") ? -1 : 1;
  const keysOf = ORDERS[order.replace("-", "")];
  const keyed = given.map((agent) => [keysOf(agent, agents), agent]);
  const byName = order.endsWith("name") ? reverse : 1;
  keyed.sort(([keys, one], [others, other]) => {
    for (let at = 0; at < keys.length; at++) if (keys[at] !== others[at]) return (keys[at] - others[at]) * reverse;
    return (one.agent_id < other.agent_id ? -1 : 1) * byName;
  });
  return keyed.map(([, agent]) => agent);
}
