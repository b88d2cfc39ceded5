// The fleet's traffic of the last minutes: bars, their values, and a table.

import { agoText, barPath, ceiling } from "./charts.js";
import { byId, figures, fillRows, rateText, setAttribute, setText } from "./dom.js";
import { Readout } from "./tip.js";

const KINDS = ["allowed", "warned", "denied"];
const BARS = 60;
const WIDTH = 600;
const HEIGHT = 120;

const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);

/** Several slots to a bar, so that its parts can be seen. */
export class Timeline {
  #points = new Map(); // by slot
  #slot = 0;
  #slots = BARS;
  #seconds = 5;
  #rates = []; // of each bar, per second

  constructor() {
    byId("numbers").addEventListener("toggle", () => this.draw());
    new Readout(byId("timeline"), { places: () => BARS, text: (place) => this.#value(place) });
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
    const first = Math.floor(this.#slot / together) - BARS + 1;
    const bars = this.#sums(BARS, (at) => Math.floor(at / together) - first);
    const newest = this.#seconds * ((this.#slot % together) + 1); // seconds of the last bar, which still grows
    this.#rates = bars.map((counts, at) => {
      const seconds = at === BARS - 1 ? newest : together * this.#seconds;
      return counts.map((count) => count / seconds);
    });
    const top = ceiling(Math.max(...this.#rates.map(total)));
    const [scale, wide] = [HEIGHT / top, WIDTH / BARS];
    KINDS.forEach((kind, number) => {
      const drawn = this.#rates.map((rates, at) => {
        return [at * wide + 1, total(rates.slice(0, number)) * scale, rates[number] * scale];
      });
      setAttribute(byId(`bars-${kind}`), "d", barPath(drawn, wide - 2, HEIGHT));
    });
    const sums = KINDS.map((_, number) => total([...this.#points.values()].map((counts) => counts[number])));
    KINDS.forEach((kind, number) => setText(byId(`sum-${kind}`), figures.format(sums[number])));
    setText(byId("peak"), `${figures.format(top)} per second`);
    const description = KINDS.map((kind, number) => `${figures.format(sums[number])} ${kind}`).join(", ");
    setAttribute(byId("timeline"), "aria-label", `Checks in the last 15 minutes: ${description}`);
    if (byId("numbers").open) this.#tabulate();
  }

  #value(place) {
    const [allowed, warned, denied] = this.#rates[place].map(rateText);
    const ago = (BARS - 1 - place) * (this.#slots / BARS) * this.#seconds;
    return `${agoText(ago)}: ${allowed} allowed, ${warned} warned, ${denied} denied per second`;
  }

  #tabulate() {
    const perMinute = 60 / this.#seconds;
    const sums = this.#sums(this.#slots / perMinute, (at) => Math.floor((this.#slot - at) / perMinute));
    fillRows(byId("numbers-rows"), sums.map((counts, at) => [String(at), ...counts.map(figures.format)]));
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
