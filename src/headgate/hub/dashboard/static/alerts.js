// Alerts: the list, and a notice for each new one, once.

import { made, mark, one, say, show } from "./dom.js";
import { keep, kept } from "./keeping.js";

const MOST_TOASTS = 3;

/** A notice in a corner, until it is dismissed or too many others have come. */
export function toast(text) {
  const node = made("toast-template");
  say(node.querySelector("p"), text);
  node.querySelector("button").addEventListener("click", () => node.remove());
  const toasts = one("toasts");
  toasts.append(node);
  while (toasts.children.length > MOST_TOASTS) toasts.firstElementChild.remove();
  return node;
}

const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function told(alert) {
  const minutes = alert.within / 60;
  const within = minutes >= 1 ? `${minutes} min` : `${alert.within} s`;
  return `${alert.violations} violations within ${within}${alert.times > 1 ? `, ${alert.times} times over` : ""}`;
}

/** `choose` is called with the name of the agent whose alert is clicked. */
export class Alerts {
  #choose;
  #seen = null; // which we know, null before the first snapshot
  #toasts = new Map(); // by alert
  #told = "";

  constructor(choose) {
    this.#choose = choose;
    one("notify").addEventListener("click", () => this.#ask());
    this.#offer();
  }

  /** What the hub says there is, open and resolved, newest first. */
  take(alerts) {
    const fresh = this.#seen ? alerts.filter((alert) => !alert.resolved_at && !this.#seen.has(key(alert))) : [];
    this.#seen = new Set(alerts.map(key));
    for (const alert of fresh.reverse()) this.#announce(alert);
    for (const alert of alerts) if (alert.resolved_at) this.#toasts.get(alert.alert_id)?.remove();
    const open = alerts.filter((alert) => !alert.resolved_at).length;
    document.title = open ? `(${open}) headgate` : "headgate";
    this.#draw(alerts);
  }

  /** Forget everything, since somebody else may look now. */
  clear() {
    this.#seen = null;
    this.#toasts.clear();
    one("toasts").replaceChildren();
    document.title = "headgate";
  }

  #draw(alerts) {
    const text = JSON.stringify(alerts);
    if (text === this.#told) return;
    this.#told = text;
    show(one("no-alerts"), !alerts.length);
    one("alerts").replaceChildren(...alerts.map((alert) => this.#row(alert)));
  }

  #row(alert) {
    const node = made("alert-template");
    mark(node, "data-open", !alert.resolved_at);
    say(node.querySelector(".badge"), alert.resolved_at ? "resolved" : "open");
    say(node.querySelector("bdi"), alert.agent_id);
    say(node.querySelector(".what"), told(alert));
    node.querySelector("button").addEventListener("click", () => this.#choose(alert.agent_id));
    const when = node.querySelector("time");
    when.dateTime = new Date(alert.raised_at * 1000).toISOString();
    say(when, time(alert.raised_at) + (alert.resolved_at ? `, resolved ${time(alert.resolved_at)}` : ""));
    return node;
  }

  #announce(alert) {
    const text = `${alert.agent_id}: ${told(alert)}`;
    this.#toasts.get(alert.alert_id)?.remove();
    this.#toasts.set(alert.alert_id, toast(text));
    if (!this.#wanted()) return;
    try {
      new Notification("headgate: many violations", { body: text, tag: alert.alert_id, renotify: true });
    } catch {
      // on some phones only a service worker may; the notice on the page is there
    }
  }

  // Notifications of the browser: asked for by a click, and only then ------------------------------------------------

  #wanted() {
    return "Notification" in window && Notification.permission === "granted" && kept("notify") === "on";
  }

  async #ask() {
    if (this.#wanted()) {
      keep("notify", "off");
    } else if ((await Notification.requestPermission()) === "granted") {
      keep("notify", "on");
    } else {
      toast("This browser doesn't let the dashboard notify you: its settings for this site say so.");
    }
    this.#offer();
  }

  #offer() {
    show(one("notify"), "Notification" in window && window.isSecureContext);
    mark(one("notify"), "aria-pressed", this.#wanted());
  }
}

/** The same alert may be raised again. */
const key = ({ alert_id, times }) => `${alert_id} ${times}`;
