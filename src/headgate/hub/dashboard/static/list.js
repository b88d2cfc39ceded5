// The list of agents, as a table or as cards: which of them, and in which order.

import { Cards, MANY } from "./cards.js";
import { byId, figures, setAttribute, setText, setVisible } from "./dom.js";
import { FILTERS, finds, sorted } from "./orders.js";
import { Table } from "./table.js";
import { agentLink } from "./view.js";

const HOLD_MS = 5000; // between two changes of the order, and for which it is held after a touch

/** `choose` is called with the parts of the view that the user changes. */
export class AgentList {
  #agents;
  #table;
  #cards;
  #node = byId("list");
  #view = { search: "", show: "all", sort: "urgency", list: "" };
  #order = []; // the agents that are shown
  #arranged = 0; // when, last
  #touched = -HOLD_MS;
  #rearrange = true;

  constructor(agents, choose) {
    this.#agents = agents;
    this.#table = new Table(agents);
    this.#cards = new Cards(agents);
    for (const event of ["pointerdown", "pointermove", "keydown", "wheel", "touchmove"]) {
      this.#node.addEventListener(event, () => (this.#touched = performance.now()), { passive: true });
    }
    for (const head of byId("columns").children) {
      head.querySelector("button")?.addEventListener("click", () => choose({ sort: this.#next(head.dataset.sort) }));
    }
    byId("as-table").addEventListener("click", () => choose({ list: "table" }));
    byId("as-cards").addEventListener("click", () => choose({ list: "cards" }));
  }

  /** The order after a click on a column's head: the other way round, and then the first one again. */
  #next(name) {
    if (this.#view.sort === name) return `-${name}`;
    return this.#view.sort === `-${name}` ? "urgency" : name;
  }

  /** Apply a view. */
  show(view) {
    const { search, show, sort, list } = view;
    const same = Object.entries({ search, show, sort, list }).every(([name, value]) => this.#view[name] === value);
    if (!same) {
      this.#rearrange = true;
      this.#cards.reset();
    }
    this.#view = { search, show, sort, list };
    this.draw();
    this.#shown.resume();
  }

  /** Another user may see other agents. */
  reset() {
    [this.#order, this.#rearrange] = [[], true];
  }

  focus(name) {
    const agent = this.#agents.get(name);
    return Boolean(agent) && this.#shown.focus(agent);
  }

  /** Count the waits down. */
  tick() {
    this.#shown.tick();
  }

  get #shown() {
    const { list } = this.#view;
    const table = list ? list === "table" : this.#agents.size + this.#agents.more > MANY;
    return table ? this.#table : this.#cards;
  }

  draw() {
    const shown = this.#shown;
    for (const one of [this.#table, this.#cards]) setVisible(one.node, one === shown && this.#agents.size > 0);
    setAttribute(byId("as-table"), "aria-pressed", shown === this.#table);
    setAttribute(byId("as-cards"), "aria-pressed", shown === this.#cards);
    const held = this.#arrange();
    shown.draw(this.#order);
    this.#drawHeads();
    this.#drawCounts(held);
  }

  #drawHeads() {
    const { sort } = this.#view;
    for (const head of byId("columns").children) {
      const name = head.dataset.sort;
      const downwards = name === "name" ? sort === "-name" : sort === name; // numbers begin with the largest
      if (!name || sort.replace("-", "") !== name) head.removeAttribute("aria-sort");
      else setAttribute(head, "aria-sort", downwards ? "descending" : "ascending");
    }
  }

  #drawCounts(held) {
    const agents = [...this.#agents.all()];
    for (const input of byId("filters").elements) {
      if (input.name !== "show") continue;
      setText(input.nextElementSibling, figures.format(agents.filter(FILTERS[input.value]).length));
    }
    const [all, shown] = [agents.length + this.#agents.more, this.#order.length];
    setText(byId("count"), all ? `${figures.format(shown)} of ${figures.format(all)} shown` : "");
    setVisible(byId("held"), held);
    setVisible(byId("more"), this.#agents.more > 0);
    const [more, first] = [this.#agents.more, agents.length].map(figures.format);
    setText(byId("more"), `${more} more are not listed: these are the first ${first}, those that are rate limited before others.`);
    setVisible(byId("no-agents"), !all);
    setAttribute(byId("agents-section"), "data-empty", !all);
    setVisible(byId("no-match"), all > 0 && !shown);
    const name = this.#view.search.replace(/^"(.+)"$/, "$1");
    setVisible(byId("open-searched"), Boolean(name));
    setAttribute(byId("open-searched"), "href", agentLink(name));
    setText(byId("searched"), name);
  }

  /** Choose the agents to show. While somebody uses the list, no agent moves; whether that is so. */
  #arrange() {
    const now = performance.now();
    const wanted = [...this.#agents.all()].filter((agent) => this.#matches(agent));
    const there = new Set(this.#order);
    const held = !this.#rearrange && this.#order.length > 0 && this.#isUsed(now);
    if (held) {
      for (const agent of wanted) if (!there.has(agent)) this.#order.push(agent);
      return true;
    }
    const changed = wanted.length !== there.size || wanted.some((agent) => !there.has(agent));
    if (this.#rearrange || changed || now - this.#arranged > HOLD_MS) {
      this.#order = sorted(wanted, this.#view.sort, this.#agents);
      [this.#arranged, this.#rearrange] = [now, false];
    }
    return false;
  }

  /** Whether the pointer is over an agent, the focus is in one, or one was touched a moment ago. */
  #isUsed(now) {
    const where = this.#shown === this.#table ? byId("rows") : byId("agents");
    const pointed = matchMedia("(hover: hover)").matches && where.matches(":hover");
    return now - this.#touched < HOLD_MS || pointed || where.contains(document.activeElement);
  }

  #matches(agent) {
    return FILTERS[this.#view.show](agent) && finds(this.#view.search, agent.agent_id);
  }
}
