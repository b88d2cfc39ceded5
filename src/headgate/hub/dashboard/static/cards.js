// The cards of agents.

import { ceiling, Spark } from "./charts.js";
import { byId, figures, fromTemplate, placeChildren, rateText, setAttribute, setText, setVisible, spanText } from "./dom.js";
import { drawMeter, drawState, stateNode, usageText, violationsText } from "./state.js";
import { agentLink } from "./view.js";

/** Cards that are drawn at first. Above this number of agents, a table is shown unless somebody wants cards. */
export const MANY = 40;

class Card {
  constructor(agent, agents) {
    [this.agent, this.agents] = [agent, agents];
    this.node = fromTemplate("card-template");
    const find = (selector) => this.node.querySelector(selector);
    this.link = find("a");
    this.parts = {
      state: stateNode(), meter: find(".meter"), usage: find(".usage"), rate: find(".rate"), denied: find(".denied-minute"),
      violations: find(".violations"), backoff: find(".backoff"),
    };
    find(".state-cell").append(this.parts.state);
    setText(find("bdi"), agent.agent_id);
    setAttribute(this.link, "href", agentLink(agent.agent_id));
    this.link.title = agent.agent_id;
    this.spark = new Spark(find(".spark"), agents, this.link);
  }

  draw(top) {
    const { agent, parts } = this;
    const drawn = `${agent.version} ${this.agents.slot} ${top}`;
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    drawState(parts.state, agent);
    drawMeter(parts.meter, agent.usage);
    setText(parts.usage, usageText(agent.usage));
    this.spark.draw(agent, top);
    setText(parts.rate, `${rateText(this.agents.rate(agent))} per second`);
    setText(parts.denied, `${figures.format(agent.denied_per_minute ?? 0)} denied a minute`);
    setAttribute(parts.denied, "data-some", agent.denied_per_minute > 0);
    setText(parts.violations, violationsText(agent));
    setAttribute(parts.violations, "data-some", agent.violations > 0);
    this.countDown();
  }

  countDown() {
    const { wait } = this.agent;
    setVisible(this.parts.backoff, wait > 0);
    if (wait) setText(this.parts.backoff, `retry in ${spanText(wait)}`);
  }
}

export class Cards {
  node = byId("cards");
  #list = byId("agents");
  #agents;
  #cards = new Map(); // by agent
  #most = MANY;
  #order = [];

  constructor(agents) {
    this.#agents = agents;
    byId("more-cards").addEventListener("click", () => {
      const next = this.#order[this.#most];
      this.#most += MANY;
      this.draw(this.#order);
      this.focus(next);
    });
  }

  /** Show these agents in this order: the first of them. */
  draw(order) {
    this.#order = order;
    const shown = order.slice(0, this.#most);
    const wanted = new Set(shown);
    for (const agent of this.#cards.keys()) if (!wanted.has(agent)) this.#cards.delete(agent);
    const top = ceiling(this.#agents.most());
    const nodes = shown.map((agent) => {
      let card = this.#cards.get(agent);
      if (!card) this.#cards.set(agent, (card = new Card(agent, this.#agents)));
      card.draw(top);
      return card.node;
    });
    placeChildren(this.#list, nodes);
    const left = order.length - shown.length;
    setVisible(byId("more-cards"), left > 0);
    setText(byId("more-cards"), `Show ${Math.min(left, MANY)} more of ${figures.format(left)}`);
  }

  tick() {
    for (const card of this.#cards.values()) card.countDown();
  }

  resume() {}

  /** Start again with the first ones. */
  reset() {
    this.#most = MANY;
  }

  focus(agent) {
    const card = this.#cards.get(agent);
    card?.link.focus({ preventScroll: true });
    card?.node.scrollIntoView({ block: "nearest" });
    return Boolean(card);
  }
}
