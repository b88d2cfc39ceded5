// Bars, and the sparks of the agents.

import { figures, rateText, setAttribute } from "./dom.js";
import { Readout } from "./tip.js";

const SPARK_HEIGHT = 24;

const round = (value) => Math.round(value * 100) / 100;

/** Bars as one path: each has a place, a start and a height, in units of the drawing. */
export function barPath(bars, width, height) {
  let path = "";
  for (const [x, low, high] of bars) {
    if (high > 0) path += `M${x} ${round(height - low)}v${round(-high)}h${width}v${round(high)}z`;
  }
  return path;
}

/** The smallest round number that is not below `value`. */
export function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

/** How long ago something was. */
export function agoText(seconds) {
  const [minutes, rest] = [Math.floor(seconds / 60), seconds % 60];
  const parts = [minutes && `${minutes} min`, rest && `${rest} s`].filter(Boolean);
  return parts.length ? `${parts.join(" ")} ago` : "now";
}

/** The traffic of an agent. All sparks have the same scale; `agents` has the slots. */
export class Spark {
  #svg;
  #agents;
  #agent = null;

  constructor(svg, agents, focus) {
    [this.#svg, this.#agents] = [svg, agents];
    new Readout(svg, { places: () => agents.slots, text: (place) => this.#value(place), focus });
  }

  #value(place) {
    const { slots, seconds } = this.#agents;
    const at = this.#agents.at(place);
    const [passed, denied] = [this.#agent.passed[at], this.#agent.denied[at]].map((many) => rateText(many / seconds));
    return `${agoText((slots - 1 - place) * seconds)}: ${passed} passed, ${denied} denied per second`;
  }

  /** Draw an agent's traffic, where `top` requests in a slot fill the height. */
  draw(agent, top) {
    this.#agent = agent;
    const [low, high] = [[], []];
    let [passed, denied] = [0, 0];
    for (let place = 0; place < this.#agents.slots; place++) {
      const at = this.#agents.at(place);
      const [good, bad] = [agent.passed[at], agent.denied[at]];
      if (!good && !bad) continue;
      [passed, denied] = [passed + good, denied + bad];
      const whole = Math.max(((good + bad) / top) * SPARK_HEIGHT, 1); // little is still something
      const part = (whole * good) / (good + bad);
      low.push([place, 0, part]);
      high.push([place, part, whole - part]);
    }
    const [, first, second] = this.#svg.children;
    setAttribute(first, "d", barPath(low, 0.8, SPARK_HEIGHT));
    setAttribute(second, "d", barPath(high, 0.8, SPARK_HEIGHT));
    const traffic = `${figures.format(passed)} passed, ${figures.format(denied)} denied`;
    setAttribute(this.#svg, "aria-label", `Last five minutes: ${traffic}`);
  }
}
