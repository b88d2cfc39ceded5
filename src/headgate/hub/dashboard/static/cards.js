// The agents' cards: what each says, which are shown, and in which order.

import { drawSpark } from "./charts.js";
import { figures, made, mark, one, say, show } from "./dom.js";

const REST = 5000; // ms for which cards stay in their places
const LARGEST = 1e15; // no bucket is larger: it is no bucket

const SHOWN = {
  all: () => true,
  connected: (agent) => agent.connected,
  limited: (agent) => agent.rate_limited,
  violations: (agent) => agent.violations > 0 || agent.violations_last_hour > 0,
  override: (agent) => agent.override,
  exempt: (agent) => agent.exempt,
};

const ORDERS = {
  usage: (agent) => -(agent.usage?.used ?? -1),
  violations: (agent) => -(agent.violations_last_hour + agent.violations / 1e6),
  traffic: (agent) => -[...agent.spark.values()].reduce((sum, [passed, denied]) => sum + passed + denied, 0),
  name: () => 0,
};

/** Green below half, yellow up to and with four fifths, red above. Counted in whole tokens, so that it is exact. */
function level({ remaining, capacity }) {
  const used = capacity - remaining;
  if (used * 5 > capacity * 4 || capacity === 0) return "red";
  return used * 2 >= capacity ? "yellow" : "green";
}

/** The share that is used, in whole percent on the same side of the thresholds as the colour. */
function percent(usage) {
  if (usage.capacity === 0) return 100;
  const whole = Math.floor(((usage.capacity - usage.remaining) * 100) / usage.capacity);
  return level(usage) === "red" ? Math.max(whole, 81) : whole;
}

function usageText(usage) {
  const lane = `${usage.channel} ${usage.tier}`;
  if (usage.capacity === 0) return `blocked, ${lane}`;
  if (usage.capacity > LARGEST) return `unlimited, ${lane}`;
  const [used, capacity] = [usage.capacity - usage.remaining, usage.capacity].map(figures.format);
  return `${used} of ${capacity} used, ${lane}, ${percent(usage)} %`;
}

function violationsText({ violations, violations_last_hour: hour }) {
  if (!violations && !hour) return "no violations";
  return `violations: ${figures.format(violations)} in a row, ${figures.format(hour)} in an hour`;
}

class Card {
  constructor(name, change) {
    this.agent = { agent_id: name, spark: new Map() };
    this.node = made("card-template");
    const find = (selector) => this.node.querySelector(selector);
    this.parts = {
      change: find(".change"), presence: find(".presence"), limited: find(".limited"), own: find(".own"),
      free: find(".free"), meter: find(".meter"), usage: find(".usage"), spark: find(".spark"),
      violations: find(".violations"), backoff: find(".backoff"),
    };
    say(find("bdi"), name);
    find(".name").title = name;
    mark(this.parts.change, "aria-label", `Change the limits of ${name}`);
    this.parts.change.addEventListener("click", () => change(name));
    this.dirty = true;
  }

  /** Take what has changed: some fields, and some slots of the spark. */
  take({ spark = [], ...fields }) {
    Object.assign(this.agent, fields);
    for (const [at, ...counts] of spark) this.agent.spark.set(at, counts);
    if ("wait_left_ms" in fields) this.agent.until = performance.now() + fields.wait_left_ms;
    this.dirty = true;
  }

  /** Forget what is older than the spark spans. */
  turn(slot, slots) {
    for (const at of this.agent.spark.keys()) {
      if (at <= slot - slots) this.agent.spark.delete(at);
      this.dirty = true; // what is left moves
    }
  }

  draw(slot, slots, admin) {
    const { agent, parts } = this;
    mark(this.node, "data-connected", agent.connected);
    say(parts.presence, agent.connected ? "connected" : "not connected");
    show(parts.limited, agent.rate_limited);
    show(parts.own, agent.override);
    show(parts.free, agent.exempt);
    show(parts.change, admin);
    this.#drawUsage(agent.usage);
    drawSpark(parts.spark, agent.spark, slot, slots);
    say(parts.violations, violationsText(agent));
    mark(parts.violations, "data-some", agent.violations > 0);
    this.count();
    this.dirty = false;
  }

  #drawUsage(usage) {
    const { meter, usage: text } = this.parts;
    const told = usage ? usageText(usage) : "exempt: nothing is counted";
    say(text, told);
    mark(meter, "data-level", usage ? level(usage) : "none");
    mark(meter, "aria-valuenow", usage ? percent(usage) : 0);
    mark(meter, "aria-valuetext", told);
    const share = usage ? (usage.capacity ? 1 - usage.remaining / usage.capacity : 1) : 0;
    const wide = `${Math.round(share * 1000) / 10}%`;
    if (meter.firstElementChild.style.width !== wide) meter.firstElementChild.style.width = wide;
  }

  /** Count the wait down. */
  count() {
    const left = Math.ceil(((this.agent.until ?? 0) - performance.now()) / 1000);
    const waits = left > 0 && this.agent.rate_limited;
    show(this.parts.backoff, waits);
    if (waits) say(this.parts.backoff, `told to come back in ${figures.format(left)} s`);
  }
}

/** All cards. `change` is called with the name of the agent that the admin wants to change. */
export class Cards {
  #cards = new Map(); // by agent
  #list = one("agents");
  #change;
  #admin = false;
  #slot = 0;
  #slots = 60;
  #more = 0;
  #view = { search: "", show: "all", sort: "usage" };
  #arranged = 0; // when
  #held = 0; // until when
  #anew = true;

  constructor(change) {
    this.#change = change;
    for (const event of ["pointermove", "pointerdown", "focusin", "keydown"]) {
      this.#list.addEventListener(event, () => (this.#held = performance.now() + REST), { passive: true });
    }
  }

  agent(name) {
    return this.#cards.get(name)?.agent;
  }

  /** Begin anew with a snapshot. Cards that stay keep their nodes. */
  load({ admin, agent_slots, slot, agents, more }) {
    [this.#admin, this.#slots] = [admin, agent_slots];
    const here = new Set(agents.map((agent) => agent.agent_id));
    for (const card of this.#cards.values()) card.agent.spark.clear();
    this.take({ slot, agents, more, gone: [...this.#cards.keys()].filter((name) => !here.has(name)) });
    this.#anew = true;
  }

  /** What an update says of agents. */
  take({ slot, agents = [], gone = [], more = this.#more }) {
    this.#more = more;
    for (const name of gone) {
      this.#cards.get(name)?.node.remove();
      this.#cards.delete(name);
    }
    for (const agent of agents) {
      let card = this.#cards.get(agent.agent_id);
      if (!card) this.#cards.set(agent.agent_id, (card = new Card(agent.agent_id, this.#change)));
      card.take(agent);
    }
    if (slot !== this.#slot) for (const card of this.#cards.values()) card.turn(slot, this.#slots);
    this.#slot = slot;
  }

  /** Show those that match, in this order. */
  show(view) {
    this.#view = view;
    this.#anew = true;
    this.draw();
  }

  draw() {
    for (const card of this.#cards.values()) if (card.dirty) card.draw(this.#slot, this.#slots, this.#admin);
    const agents = [...this.#cards.values()].map((card) => card.agent);
    for (const input of one("filters").elements) {
      if (input.name === "show") say(input.nextElementSibling, String(agents.filter(SHOWN[input.value]).length));
    }
    const shown = this.#arrange();
    const all = agents.length + this.#more;
    say(one("count"), all ? `${figures.format(shown)} of ${figures.format(all)} shown` : "");
    show(one("more"), this.#more > 0);
    const [more, first] = [this.#more, agents.length].map(figures.format);
    say(one("more"), `${more} more are not shown: here are the first ${first}, those with violations before others.`);
    show(one("no-agents"), !all);
    show(one("no-match"), all > 0 && !shown);
  }

  /** Count the waits down. */
  tick() {
    for (const card of this.#cards.values()) card.count();
  }

  /** Put the cards that match into the list; how many there are. None moves while somebody is at it. */
  #arrange() {
    const wanted = [...this.#cards.values()].filter((card) => this.#matches(card.agent));
    const [now, there] = [performance.now(), new Set(this.#list.children)];
    const changed = there.size !== wanted.length || wanted.some((card) => !there.has(card.node));
    if (this.#anew || (now > this.#held && (changed || now - this.#arranged > REST))) {
      const order = ORDERS[this.#view.sort];
      const places = new Map(wanted.map((card) => [card, order(card.agent)]));
      const name = ({ agent }) => agent.agent_id;
      wanted.sort((a, b) => places.get(a) - places.get(b) || (name(a) < name(b) ? -1 : 1));
      [this.#arranged, this.#anew] = [now, false];
      this.#place(wanted.map((card) => card.node));
    } else if (changed) {
      const nodes = new Set(wanted.map((card) => card.node));
      this.#place([...[...there].filter((node) => nodes.has(node)), ...[...nodes].filter((node) => !there.has(node))]);
    }
    return wanted.length;
  }

  #place(nodes) {
    const [wanted, focused] = [new Set(nodes), document.activeElement];
    for (const node of [...this.#list.children]) if (!wanted.has(node)) node.remove();
    let next = this.#list.firstElementChild;
    for (const node of nodes) {
      if (node === next) next = next.nextElementSibling;
      else this.#list.insertBefore(node, next);
    }
    if (focused !== document.activeElement) focused.focus({ preventScroll: true }); // lost by moving
  }

  #matches(agent) {
    const { search, show: which } = this.#view;
    if (!SHOWN[which](agent)) return false;
    if (/^".+"$/.test(search)) return agent.agent_id === search.slice(1, -1);
    return agent.agent_id.toLowerCase().includes(search.toLowerCase());
  }
}
