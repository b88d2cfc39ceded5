// The agents' cards: their content, filters and order.

import { drawSpark } from "./charts.js";
import { figures, fromTemplate, setAttribute, byId, setText, setVisible } from "./dom.js";

const REST = 5000; // ms for which cards keep their places
const LARGEST = 1e15; // a larger capacity means unlimited

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

/** Green below half, yellow up to and including four fifths, red above. Exact, in whole tokens. */
function level({ remaining, capacity }) {
  const used = capacity - remaining;
  if (used * 5 > capacity * 4 || capacity === 0) return "red";
  return used * 2 >= capacity ? "yellow" : "green";
}

/** The used share in whole percent, on the same side of the thresholds as the colour. */
function percent(usage) {
  if (usage.capacity === 0) return 100;
  const whole = Math.floor(((usage.capacity - usage.remaining) * 100) / usage.capacity);
  return level(usage) === "red" ? Math.max(whole, 81) : whole;
}

function usageText(usage) {
  const bucket = `${usage.channel} ${usage.tier}`;
  if (usage.capacity === 0) return `blocked, ${bucket}`;
  if (usage.capacity > LARGEST) return `unlimited, ${bucket}`;
  const [used, capacity] = [usage.capacity - usage.remaining, usage.capacity].map(figures.format);
  return `${used} of ${capacity} used, ${bucket}, ${percent(usage)} %`;
}

function violationsText({ violations, violations_last_hour: hour }) {
  if (!violations && !hour) return "no violations";
  return `violations: ${figures.format(violations)} in a row, ${figures.format(hour)} in an hour`;
}

class Card {
  constructor(name, change) {
    this.agent = { agent_id: name, spark: new Map() };
    this.node = fromTemplate("card-template");
    const find = (selector) => this.node.querySelector(selector);
    this.parts = {
      change: find(".change"), presence: find(".presence"), limited: find(".limited"), own: find(".own"),
      free: find(".free"), meter: find(".meter"), usage: find(".usage"), spark: find(".spark"),
      violations: find(".violations"), backoff: find(".backoff"),
    };
    setText(find("bdi"), name);
    find(".name").title = name;
    setAttribute(this.parts.change, "aria-label", `Change the limits of ${name}`);
    this.parts.change.addEventListener("click", () => change(name));
    this.dirty = true;
  }

  /** Apply changed fields, and slots of the spark. */
  update({ spark = [], ...fields }) {
    Object.assign(this.agent, fields);
    for (const [at, ...counts] of spark) this.agent.spark.set(at, counts);
    if ("wait_left_ms" in fields) this.agent.until = performance.now() + fields.wait_left_ms;
    this.dirty = true;
  }

  /** Remove slots older than the spark spans. */
  advance(slot, slots) {
    for (const at of this.agent.spark.keys()) {
      if (at <= slot - slots) this.agent.spark.delete(at);
      this.dirty = true; // the others move
    }
  }

  draw(slot, slots, admin) {
    const { agent, parts } = this;
    setAttribute(this.node, "data-connected", agent.connected);
    setText(parts.presence, agent.connected ? "connected" : "not connected");
    setVisible(parts.limited, agent.rate_limited);
    setVisible(parts.own, agent.override);
    setVisible(parts.free, agent.exempt);
    setVisible(parts.change, admin);
    this.#drawUsage(agent.usage);
    drawSpark(parts.spark, agent.spark, slot, slots);
    setText(parts.violations, violationsText(agent));
    setAttribute(parts.violations, "data-some", agent.violations > 0);
    this.countDown();
    this.dirty = false;
  }

  #drawUsage(usage) {
    const { meter, usage: text } = this.parts;
    const description = usage ? usageText(usage) : "exempt: nothing is counted";
    setText(text, description);
    setAttribute(meter, "data-level", usage ? level(usage) : "none");
    setAttribute(meter, "aria-valuenow", usage ? percent(usage) : 0);
    setAttribute(meter, "aria-valuetext", description);
    const share = usage ? (usage.capacity ? 1 - usage.remaining / usage.capacity : 1) : 0;
    const wide = `${Math.round(share * 1000) / 10}%`;
    if (meter.firstElementChild.style.width !== wide) meter.firstElementChild.style.width = wide;
  }

  /** Count the wait down. */
  countDown() {
    const left = Math.ceil(((this.agent.until ?? 0) - performance.now()) / 1000);
    const waits = left > 0 && this.agent.rate_limited;
    setVisible(this.parts.backoff, waits);
    if (waits) setText(this.parts.backoff, `asked to retry in ${figures.format(left)} s`);
  }
}

/** All cards. `change` is called with the name of an agent when the admin clicks on its menu. */
export class Cards {
  #cards = new Map(); // by agent
  #list = byId("agents");
  #change;
  #admin = false;
  #slot = 0;
  #slots = 60;
  #more = 0;
  #view = { search: "", show: "all", sort: "usage" };
  #arranged = 0; // when, last
  #frozenUntil = 0; // while somebody uses the list
  #rearrange = true;

  constructor(change) {
    this.#change = change;
    for (const event of ["pointermove", "pointerdown", "focusin", "keydown"]) {
      this.#list.addEventListener(event, () => (this.#frozenUntil = performance.now() + REST), { passive: true });
    }
  }

  agent(name) {
    return this.#cards.get(name)?.agent;
  }

  /** Start again from a snapshot. Cards that stay keep their nodes. */
  load({ admin, agent_slots, slot, agents, more }) {
    [this.#admin, this.#slots] = [admin, agent_slots];
    const here = new Set(agents.map((agent) => agent.agent_id));
    for (const card of this.#cards.values()) card.agent.spark.clear();
    this.update({ slot, agents, more, gone: [...this.#cards.keys()].filter((name) => !here.has(name)) });
    this.#rearrange = true;
  }

  /** Apply an update. */
  update({ slot, agents = [], gone = [], more = this.#more }) {
    this.#more = more;
    for (const name of gone) {
      this.#cards.get(name)?.node.remove();
      this.#cards.delete(name);
    }
    for (const agent of agents) {
      let card = this.#cards.get(agent.agent_id);
      if (!card) this.#cards.set(agent.agent_id, (card = new Card(agent.agent_id, this.#change)));
      card.update(agent);
    }
    if (slot !== this.#slot) for (const card of this.#cards.values()) card.advance(slot, this.#slots);
    this.#slot = slot;
  }

  /** Apply a view: search, filter and order. */
  show(view) {
    this.#view = view;
    this.#rearrange = true;
    this.draw();
  }

  draw() {
    for (const card of this.#cards.values()) if (card.dirty) card.draw(this.#slot, this.#slots, this.#admin);
    const agents = [...this.#cards.values()].map((card) => card.agent);
    for (const input of byId("filters").elements) {
      if (input.name === "show") setText(input.nextElementSibling, String(agents.filter(SHOWN[input.value]).length));
    }
    const shown = this.#arrange();
    const all = agents.length + this.#more;
    setText(byId("count"), all ? `${figures.format(shown)} of ${figures.format(all)} shown` : "");
    setVisible(byId("more"), this.#more > 0);
    const [more, first] = [this.#more, agents.length].map(figures.format);
    setText(byId("more"), `${more} more are not shown: these are the first ${first}, those with violations before others.`);
    setVisible(byId("no-agents"), !all);
    setVisible(byId("no-match"), all > 0 && !shown);
  }

  /** Count the waits down. */
  tick() {
    for (const card of this.#cards.values()) card.countDown();
  }

  /** Put the matching cards into the list; their number. No card moves while somebody uses the list. */
  #arrange() {
    const wanted = [...this.#cards.values()].filter((card) => this.#matches(card.agent));
    const [now, there] = [performance.now(), new Set(this.#list.children)];
    const changed = there.size !== wanted.length || wanted.some((card) => !there.has(card.node));
    if (this.#rearrange || (now > this.#frozenUntil && (changed || now - this.#arranged > REST))) {
      const order = ORDERS[this.#view.sort];
      const places = new Map(wanted.map((card) => [card, order(card.agent)]));
      const name = ({ agent }) => agent.agent_id;
      wanted.sort((a, b) => places.get(a) - places.get(b) || (name(a) < name(b) ? -1 : 1));
      [this.#arranged, this.#rearrange] = [now, false];
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
    if (focused !== document.activeElement) focused.focus({ preventScroll: true }); // moving a node takes its focus
  }

  #matches(agent) {
    const { search, show: which } = this.#view;
    if (!SHOWN[which](agent)) return false;
    if (/^".+"$/.test(search)) return agent.agent_id === search.slice(1, -1);
    return agent.agent_id.toLowerCase().includes(search.toLowerCase());
  }
}
