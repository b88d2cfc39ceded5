// The values of charts: beside the pointer, and by the arrow keys while the focus is there.

import { byId, setText } from "./dom.js";

const GAP = 8; // px

let shown = null; // the readout whose value is shown

/** Show the present value again: the chart may have been drawn, moved or removed since. */
export function refreshTip() {
  shown?.refresh();
}

/**
 * Reads a chart, an SVG with `places()` bars beside each other: `text(place)` says the values of one. The keys are
 * those of the chart, or of a node that has the focus instead.
 */
export class Readout {
  #chart;
  #places;
  #text;
  #place = -1; // the newest until another is chosen

  constructor(chart, { places, text, focus = chart }) {
    [this.#chart, this.#places, this.#text] = [chart, places, text];
    for (const event of ["pointermove", "pointerdown"]) {
      chart.addEventListener(event, ({ clientX }) => this.#point(clientX), { passive: true });
    }
    chart.addEventListener("pointerleave", () => this.hide());
    focus.addEventListener("focus", () => focus.matches(":focus-visible") && this.#show(places() - 1));
    focus.addEventListener("blur", () => this.hide());
    focus.addEventListener("keydown", (event) => this.#key(event));
  }

  #point(x) {
    const { left, width } = this.#chart.getBoundingClientRect();
    const place = Math.floor(((x - left) / width) * this.#places());
    if (place !== this.#place || shown !== this) this.#show(place);
  }

  #key(event) {
    const last = this.#places() - 1;
    const steps = { ArrowLeft: this.#place - 1, ArrowRight: this.#place + 1, Escape: null };
    if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape") return this.hide();
    event.preventDefault();
    this.#show(shown === this ? steps[event.key] : last);
    setText(byId("tip-said"), byId("tip").textContent); // for screen readers
  }

  #show(place) {
    if (shown !== this) shown?.hide();
    this.#place = Math.min(Math.max(place, 0), this.#places() - 1);
    shown = this;
    byId("tip").hidden = false;
    this.#mark(true);
    this.refresh();
  }

  hide() {
    if (shown !== this) return;
    shown = null;
    byId("tip").hidden = true;
    this.#mark(false);
  }

  refresh() {
    const { left, top, width, bottom } = this.#chart.getBoundingClientRect();
    if (!width || bottom < 0 || top > innerHeight) return this.hide();
    const tip = byId("tip");
    setText(tip, this.#text(this.#place));
    const { width: wide, height: high } = tip.getBoundingClientRect();
    const middle = left + ((this.#place + 0.5) / this.#places()) * width;
    tip.style.left = `${Math.min(Math.max(middle - wide / 2, GAP), document.documentElement.clientWidth - wide - GAP)}px`;
    tip.style.top = `${top > high + GAP * 2 ? top - high - GAP : bottom + GAP}px`;
  }

  #mark(wanted) {
    const mark = this.#chart.querySelector(".mark");
    mark.style.display = wanted ? "inline" : "none";
    if (!wanted) return;
    const step = this.#chart.viewBox.baseVal.width / this.#places();
    mark.setAttribute("x", this.#place * step);
    mark.setAttribute("width", step);
  }
}

addEventListener("scroll", refreshTip, { capture: true, passive: true });
