// The table of agents. Only the rows that are seen are in the page; the others take up their height only.

import { ceiling, Spark } from "./charts.js";
import { byId, figures, fromTemplate, placeChildren, rateText, setAttribute, setText, spanText } from "./dom.js";
import { drawMeter, drawState, shortUsage, stateNode, usageText, violationsText } from "./state.js";
import { agentLink } from "./view.js";

const MARGIN = 6; // rows above and below those that are seen

class Row {
  constructor(agents) {
    this.node = fromTemplate("row-template");
    const find = (selector) => this.node.querySelector(selector);
    this.link = find("a");
    this.parts = {
      name: find("bdi"), state: stateNode(), meter: find(".meter"), usage: find(".usage"), bucket: find(".bucket"),
      rate: find(".rate"), denied: find(".denied-minute"), violations: find(".violations"), wait: find(".wait"),
    };
    find(".state-cell").append(this.parts.state);
    this.spark = new Spark(find(".spark"), agents, this.link);
    this.agents = agents;
  }

  /** Show an agent, if it or something else that is drawn has changed. */
  draw(agent, top) {
    const drawn = `${agent.version} ${this.agents.slot} ${top}`;
    if (agent === this.agent && drawn === this.drawn) return;
    if (agent !== this.agent) this.#name(agent);
    this.drawn = drawn;
    const { parts } = this;
    drawState(parts.state, agent);
    drawMeter(parts.meter, agent.usage);
    setText(parts.usage, shortUsage(agent.usage));
    setText(parts.bucket, agent.usage ? `${agent.usage.channel} ${agent.usage.tier}` : "");
    parts.meter.parentNode.title = usageText(agent.usage);
    setText(parts.rate, rateText(this.agents.rate(agent)));
    setText(parts.denied, figures.format(agent.denied_per_minute ?? 0));
    setAttribute(parts.denied, "data-some", agent.denied_per_minute > 0);
    setText(parts.violations, figures.format(agent.violations_last_hour));
    parts.violations.title = violationsText(agent);
    setAttribute(parts.violations, "data-some", agent.violations > 0 || (agent.violations_last_hour > 0 ? "past" : false));
    this.spark.draw(agent, top);
    this.countDown();
  }

  #name(agent) {
    this.agent = agent;
    setText(this.parts.name, agent.agent_id);
    setAttribute(this.link, "href", agentLink(agent.agent_id));
    this.link.title = agent.agent_id;
  }

  countDown() {
    const { wait } = this.agent;
    setText(this.parts.wait, wait ? spanText(wait) : "–");
  }

  place(number, height) {
    if (number === this.number && height === this.height) return;
    [this.number, this.height] = [number, height];
    this.node.style.transform = `translateY(${number * height}px)`;
    setAttribute(this.node, "aria-rowindex", number + 2); // after the row of the heads
  }
}

export class Table {
  node = byId("table");
  #body = byId("rows");
  #agents;
  #order = [];
  #rows = new Map(); // by agent
  #free = [];
  #height = 34; // of a row
  #scrolled = 0;

  constructor(agents) {
    this.#agents = agents;
    this.node.addEventListener("scroll", () => this.#scroll(), { passive: true });
    addEventListener("resize", () => this.#measure());
    this.#body.addEventListener("keydown", (event) => this.#key(event));
    this.#body.addEventListener("click", ({ target }) => {
      if (!target.closest("a") && getSelection().isCollapsed) target.closest(".tr").querySelector("a").click();
    });
    this.#measure();
  }

  /** Show these agents in this order. */
  draw(order) {
    this.#order = order;
    const grid = byId("grid");
    setAttribute(grid, "aria-rowcount", order.length + 1);
    const high = `${order.length * this.#height}px`;
    if (this.#body.style.height !== high) this.#body.style.height = high;
    this.#render();
  }

  tick() {
    for (const row of this.#rows.values()) row.countDown();
  }

  /** The table is shown again: where it was. */
  resume() {
    if (this.node.scrollTop !== this.#scrolled) this.node.scrollTop = this.#scrolled;
  }

  #scroll() {
    if (this.node.hidden || !this.node.clientHeight) return; // what is hidden is at its start
    this.#scrolled = this.node.scrollTop;
    this.#render();
  }

  #measure() {
    this.#height = parseFloat(getComputedStyle(this.node).getPropertyValue("--row"));
    this.draw(this.#order);
  }

  /** Draw the rows that are seen, and the one with the focus. They are in the page in the order of the table. */
  #render() {
    const seen = Math.ceil(innerHeight / this.#height); // the table is not higher than the window
    const first = Math.max(Math.min(Math.floor(this.#scrolled / this.#height), this.#order.length - seen) - MARGIN, 0);
    const numbers = new Map();
    const focused = this.#focused();
    const apart = focused ? this.#order.indexOf(focused.agent) : -1;
    if (apart >= 0 && apart < first) numbers.set(focused.agent, apart);
    const last = Math.min(first + seen + 2 * MARGIN, this.#order.length);
    for (let number = first; number < last; number++) numbers.set(this.#order[number], number);
    if (apart >= last) numbers.set(focused.agent, apart);
    for (const [agent, row] of this.#rows) {
      if (numbers.has(agent)) continue;
      this.#rows.delete(agent);
      this.#free.push(row);
    }
    const top = ceiling(this.#agents.most());
    const nodes = [];
    for (const [agent, number] of numbers) {
      let row = this.#rows.get(agent);
      if (!row) this.#rows.set(agent, (row = this.#free.pop() ?? new Row(this.#agents)));
      row.draw(agent, top);
      row.place(number, this.#height);
      nodes.push(row.node);
    }
    placeChildren(this.#body, nodes);
  }

  #focused() {
    for (const row of this.#rows.values()) if (row.link === document.activeElement) return row;
    return null;
  }

  #key(event) {
    const row = this.#focused();
    if (!row || event.ctrlKey || event.altKey || event.metaKey) return;
    const [last, page] = [this.#order.length - 1, Math.floor(this.node.clientHeight / this.#height) - 2];
    const steps = { ArrowUp: row.number - 1, ArrowDown: row.number + 1, PageUp: row.number - page };
    Object.assign(steps, { PageDown: row.number + page, Home: 0, End: last });
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.focus(this.#order[Math.min(Math.max(steps[event.key], 0), last)]);
  }

  /** Focus the row of an agent, wherever it is. */
  focus(agent) {
    const number = this.#order.indexOf(agent);
    if (number < 0) return false;
    if (this.node.clientHeight) this.#scrolled = this.node.scrollTop; // its event may be yet to come
    const [top, high] = [number * this.#height, this.node.clientHeight - 2 * this.#height];
    if (top < this.#scrolled) this.node.scrollTop = top;
    else if (top > this.#scrolled + high) this.node.scrollTop = top - high;
    this.#scrolled = this.node.scrollTop;
    this.#render();
    const row = this.#rows.get(agent);
    row.link.focus({ preventScroll: true });
    row.node.scrollIntoView({ block: "nearest" }); // the page, too
    return true;
  }
}
