// Alerts: the list, and one notice for each new alert.

import { fromTemplate, setAttribute, byId, setText, setVisible } from "./dom.js";
import { store, stored } from "./storage.js";

const MOST_TOASTS = 3;

/** Show a notice in a corner, until it is dismissed or displaced by newer ones. */
export function toast(text) {
  const node = fromTemplate("toast-template");
  setText(node.querySelector("p"), text);
  node.querySelector("button").addEventListener("click", () => node.remove());
  const toasts = byId("toasts");
  toasts.append(node);
  while (toasts.children.length > MOST_TOASTS) toasts.firstElementChild.remove();
  return node;
}

const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

function describe(alert) {
  const minutes = alert.within / 60;
  const within = minutes >= 1 ? `${minutes} min` : `${alert.within} s`;
  return `${alert.violations} violations within ${within}${alert.times > 1 ? `, ${alert.times} times over` : ""}`;
}

/** `choose` is called with the name of the agent whose alert is clicked. */
export class Alerts {
  #choose;
  #seen = null; // known alerts; null before the first snapshot
  #toasts = new Map(); // by alert
  #drawn = "";

  constructor(choose) {
    this.#choose = choose;
    byId("notify").addEventListener("click", () => this.#toggle());
    this.#drawButton();
  }

  /** The alerts of a frame, open and resolved, newest first. */
  update(alerts) {
    const fresh = this.#seen ? alerts.filter((alert) => !alert.resolved_at && !this.#seen.has(key(alert))) : [];
    this.#seen = new Set(alerts.map(key));
    for (const alert of fresh.reverse()) this.#announce(alert);
    for (const alert of alerts) if (alert.resolved_at) this.#toasts.get(alert.alert_id)?.remove();
    const open = alerts.filter((alert) => !alert.resolved_at).length;
    document.title = open ? `(${open}) headgate` : "headgate";
    this.#draw(alerts);
  }

  /** Forget everything: another user may sign in next. */
  clear() {
    this.#seen = null;
    this.#toasts.clear();
    byId("toasts").replaceChildren();
    document.title = "headgate";
  }

  #draw(alerts) {
    const text = JSON.stringify(alerts);
    if (text === this.#drawn) return;
    this.#drawn = text;
    setVisible(byId("no-alerts"), !alerts.length);
    byId("alerts").replaceChildren(...alerts.map((alert) => this.#row(alert)));
  }

  #row(alert) {
    const node = fromTemplate("alert-template");
    setAttribute(node, "data-open", !alert.resolved_at);
    setText(node.querySelector(".badge"), alert.resolved_at ? "resolved" : "open");
    setText(node.querySelector("bdi"), alert.agent_id);
    setText(node.querySelector(".what"), describe(alert));
    node.querySelector("button").addEventListener("click", () => this.#choose(alert.agent_id));
    const when = node.querySelector("time");
    when.dateTime = new Date(alert.raised_at * 1000).toISOString();
    setText(when, time(alert.raised_at) + (alert.resolved_at ? `, resolved ${time(alert.resolved_at)}` : ""));
    return node;
  }

  #announce(alert) {
    const text = `${alert.agent_id}: ${describe(alert)}`;
    this.#toasts.get(alert.alert_id)?.remove();
    this.#toasts.set(alert.alert_id, toast(text));
    if (!this.#wanted()) return;
    try {
      new Notification("headgate: many violations", { body: text, tag: alert.alert_id, renotify: true });
    } catch {
      // some phones allow only service workers to notify; the page shows a notice anyway
    }
  }

  // Notifications of the browser: requested by a click only ----------------------------------------------------------

  #wanted() {
    return "Notification" in window && Notification.permission === "granted" && stored("notify") === "on";
  }

  async #toggle() {
    if (this.#wanted()) {
      store("notify", "off");
    } else if ((await Notification.requestPermission()) === "granted") {
      store("notify", "on");
    } else {
      toast("The browser's settings for this site block notifications.");
    }
    this.#drawButton();
  }

  #drawButton() {
    setVisible(byId("notify"), "Notification" in window && window.isSecureContext);
    setAttribute(byId("notify"), "aria-pressed", this.#wanted());
  }
}

/** An alert that is raised again is announced again. */
const key = ({ alert_id, times }) => `${alert_id} ${times}`;
