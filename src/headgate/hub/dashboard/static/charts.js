// Bar charts: the fleet's timeline, and the sparks on the cards.

import { element, figures, setAttribute, byId, setText } from "./dom.js";

const KINDS = ["allowed", "warned", "denied"];
const BARS = 60;
const WIDTH = 600;
const HEIGHT = 120;

/** Bars as one path: each has a place, a start and a height, in units of the drawing. */
function path(bars, width, height) {
  const parts = bars.filter(([, , high]) => high > 0);
  const bar = ([x, low, high]) => `M${x} ${round(height - low)}v${round(-high)}h${width}v${round(high)}z`;
  return parts.map(bar).join("");
}

const round = (value) => Math.round(value * 100) / 100;

/** The smallest round number that is not below `value`. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

/** Draw an agent's traffic: `spark` has the passed and denied requests of the last `slots` slots up to `slot`. */
export function drawSpark(svg, spark, slot, slots) {
  let [passed, denied, most] = [0, 0, 0];
  for (const [good, bad] of spark.values()) {
    [passed, denied, most] = [passed + good, denied + bad, Math.max(most, good + bad)];
  }
  const scale = 24 / Math.max(most, 1);
  const points = [...spark].map(([at, [good, bad]]) => [at - slot + slots - 1, good * scale, bad * scale]);
  const [low, high] = svg.children;
  setAttribute(low, "d", path(points.map(([x, good]) => [x, 0, good]), 0.8, 24));
  setAttribute(high, "d", path(points.map(([x, good, bad]) => [x, good, bad]), 0.8, 24));
  const traffic = `${figures.format(passed)} passed, ${figures.format(denied)} denied`;
  setAttribute(svg, "aria-label", `Last five minutes: ${traffic}`);
}

/** The fleet's traffic, several slots to a bar, so that its parts can be seen. */
export class Timeline {
  #points = new Map(); // by slot
  #slot = 0;
  #slots = BARS;
  #seconds = 5;

  constructor() {
    byId("numbers").addEventListener("toggle", () => this.draw());
  }

  /** Start again from a snapshot. */
  load({ slot, fleet_slots, slot_seconds, timeline }) {
    this.#points.clear();
    [this.#slots, this.#seconds] = [fleet_slots, slot_seconds];
    this.update({ slot, timeline });
  }

  /** Apply an update. */
  update({ slot, timeline = [] }) {
    this.#slot = slot;
    for (const [at, ...counts] of timeline) this.#points.set(at, counts);
    for (const at of this.#points.keys()) if (at <= slot - this.#slots) this.#points.delete(at);
  }

  draw() {
    const together = this.#slots / BARS;
    const bars = this.#sums(BARS, (at) => Math.floor(at / together) - Math.floor(this.#slot / together) + BARS - 1);
    const most = Math.max(...bars.map(([allowed, warned, denied]) => allowed + warned + denied));
    const top = ceiling(most);
    const scale = HEIGHT / top;
    const wide = WIDTH / BARS;
    KINDS.forEach((kind, number) => {
      const below = (counts) => total(counts.slice(0, number));
      const drawn = bars.map((counts, at) => [at * wide + 1, below(counts) * scale, counts[number] * scale]);
      setAttribute(byId(`bars-${kind}`), "d", path(drawn, wide - 2, HEIGHT));
    });
    const sums = KINDS.map((_, number) => total([...this.#points.values()].map((counts) => counts[number])));
    KINDS.forEach((kind, number) => setText(byId(`sum-${kind}`), figures.format(sums[number])));
    setText(byId("peak"), `${figures.format(top)} in ${together * this.#seconds} s`);
    const description = KINDS.map((kind, number) => `${figures.format(sums[number])} ${kind}`).join(", ");
    setAttribute(byId("timeline"), "aria-label", `Checks in the last 15 minutes: ${description}`);
    if (byId("numbers").open) this.#tabulate();
  }

  #tabulate() {
    const perMinute = 60 / this.#seconds;
    const minutes = this.#slots / perMinute;
    const rows = this.#sums(minutes, (at) => Math.floor((this.#slot - at) / perMinute));
    const table = byId("numbers-rows");
    while (table.rows.length < minutes) {
      const row = table.insertRow();
      const head = element("th", String(table.rows.length - 1));
      head.scope = "row";
      row.append(head, ...KINDS.map(() => element("td")));
    }
    rows.forEach((counts, at) => {
      counts.forEach((count, kind) => setText(table.rows[at].cells[kind + 1], figures.format(count)));
    });
  }

  /** Sums of slots: `place` says which sum a slot belongs to; slots outside are left out. */
  #sums(many, place) {
    const sums = Array.from({ length: many }, () => [0, 0, 0]);
    for (const [at, counts] of this.#points) {
      const sum = sums[place(at)];
      if (sum) counts.forEach((count, kind) => (sum[kind] += count));
    }
    return sums;
  }
}

const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
