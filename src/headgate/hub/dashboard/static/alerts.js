// Alerts: the list, and one notice for each new alert.

import { byId, figures, fromTemplate, placeChildren, plural, setAttribute, setText, setVisible, timeText } from "./dom.js";
import { notify, toast } from "./toasts.js";
import { accountLink, agentLink } from "./view.js";

const FEW = 3; // alerts that fit without a list of their own
const ALL = 1000; // alerts that are requested
const REFRESH_MS = 2000; // between two requests for all alerts

/** An alert that is raised again is announced again. */
const key = ({ alert_id, times }) => `${alert_id} ${times}`;

const whoOf = (alert) => alert.account ?? alert.agent_id;
const linkOf = (alert) => (alert.account ? accountLink(alert.account) : agentLink(alert.agent_id));
const tooLittle = ({ share, left }) => share >= 1 && Number(left) > 0; // for a hold that was denied
const shareText = (alert) => (tooLittle(alert) ? "too little left" : `${Math.round(alert.share * 100)} %`);

/** What is worse: an open alert before a resolved one, then the larger share. Violations are like a budget that is used up. */
const rankOf = ({ resolved_at: resolved, share = 1 }) => (resolved ? -1 : share);

function describe(alert) {
  if (alert.account) return `${shareText(alert)} of ${alert.limit}${alert.tool && ` by ${alert.tool}`}${tooLittle(alert) ? "" : " used"}`;
  const minutes = alert.within / 60;
  const within = minutes >= 1 ? `${minutes} min` : `${alert.within} s`;
  return `${alert.violations} violations within ${within}${alert.times > 1 ? `, ${alert.times} times over` : ""}`;
}

/** What was denied, and from where. */
function denied({ actions, address, ...alert }) {
  if (alert.account) return `of ${alert.limit}${alert.tool && ` by ${alert.tool}`}`;
  const named = actions.map(({ channel, action }) => `${channel} ${action}`.trim()).join(", ");
  return named && address ? `${named} from ${address}` : named || address;
}

/** `api` asks the hub for all alerts, which a frame may not have. */
export class Alerts {
  #api;
  #seen = null; // known alerts; null before the first snapshot
  #toasts = new Map(); // by alert
  #rows = new Map(); // by alert
  #lists = { alerts: [], account_alerts: [] }; // of agents and of accounts, as they were sent last
  #recent = [];
  #all = null; // as the hub has answered, while all are shown
  #asked = 0;
  #open = 0; // their number

  constructor(api) {
    this.#api = api;
    byId("all-alerts").addEventListener("click", () => {
      this.#expand(byId("alerts-panel").dataset.all !== "true");
      this.draw(this.#open);
    });
  }

  /** The alerts of a frame, open and resolved, newest first; it has only those lists that have changed. */
  update(frame) {
    if (!frame.alerts && !frame.account_alerts) return;
    for (const name of Object.keys(this.#lists)) this.#lists[name] = frame[name] ?? this.#lists[name];
    const alerts = Object.values(this.#lists).flat();
    alerts.sort((one, other) => other.raised_at - one.raised_at);
    const fresh = this.#seen ? alerts.filter((alert) => !alert.resolved_at && !this.#seen.has(key(alert))) : [];
    this.#seen = new Set(alerts.map(key));
    this.#recent = alerts;
    for (const alert of fresh.reverse()) this.#announce(alert);
    for (const alert of alerts) {
      if (!alert.resolved_at) continue;
      this.#toasts.get(alert.alert_id)?.remove();
      this.#toasts.delete(alert.alert_id);
    }
  }

  /** Forget everything: another user may sign in next. */
  clear() {
    [this.#seen, this.#recent] = [null, []];
    this.#lists = { alerts: [], account_alerts: [] };
    this.#expand(false);
    this.#toasts.clear();
    byId("toasts").replaceChildren();
  }

  /** `open` is the number of open alerts. */
  draw(open) {
    this.#open = open;
    const shown = this.#merged();
    setText(byId("alerts-open"), open ? `${figures.format(open)} open` : "");
    setVisible(byId("no-alerts"), !shown.length);
    const there = shown.filter((alert) => !alert.resolved_at).length;
    setAttribute(byId("alerts-panel"), "data-open", there > 0);
    const expanded = byId("alerts-panel").dataset.all === "true";
    setVisible(byId("all-alerts"), expanded || shown.length > FEW || open > there);
    setText(byId("all-alerts"), expanded ? "Show fewer" : `Show all${open > FEW ? ` ${figures.format(open)} open` : ""}`);
    const rows = new Map(shown.map((alert) => [alert.alert_id, this.#rows.get(alert.alert_id) ?? newRow(alert)]));
    this.#rows = rows;
    const worst = shown.reduce((one, other) => (rankOf(other) > rankOf(one) ? other : one), shown[0]);
    for (const alert of shown) drawRow(rows.get(alert.alert_id), alert, alert === worst);
    setVisible(byId("alerts-more"), open > 1 && there > 0);
    setText(byId("alerts-more"), `+${figures.format(open - 1)} more`);
    placeChildren(byId("alerts"), [...rows.values()]);
    if (expanded && Math.abs(Date.now() - this.#asked) > REFRESH_MS) this.#ask();
  }

  /** Those of the frames, and where all are wanted, those that the hub has answered; open ones first. */
  #merged() {
    const found = new Map((this.#all ?? []).map((alert) => [alert.alert_id, alert]));
    for (const alert of this.#recent) found.set(alert.alert_id, alert);
    const alerts = [...found.values()];
    const rank = (alert) => (alert.resolved_at ? 1 : 0);
    return alerts.sort((one, other) => rank(one) - rank(other) || other.raised_at - one.raised_at);
  }

  #expand(wanted) {
    setAttribute(byId("alerts-panel"), "data-all", wanted);
    setAttribute(byId("all-alerts"), "aria-expanded", wanted);
    if (wanted) this.#ask();
    else this.#all = null;
  }

  async #ask() {
    if (!this.#api.signedIn) return;
    this.#asked = Date.now();
    try {
      const found = await this.#api.fetch("GET", `alerts?limit=${ALL}`);
      if (byId("alerts-panel").dataset.all === "true") this.#all = [...found.alerts, ...found.account_alerts];
      setText(byId("alerts-error"), "");
      this.draw(this.#open);
    } catch (error) {
      setText(byId("alerts-error"), error.message);
    }
  }

  #announce(alert) {
    const text = `${whoOf(alert)}: ${describe(alert)}`;
    this.#toasts.get(alert.alert_id)?.remove();
    this.#toasts.set(alert.alert_id, toast(text, whoOf(alert), linkOf(alert)));
    notify(alert.account ? "a budget" : "many violations", text, alert.alert_id);
  }
}

function newRow(alert) {
  const node = fromTemplate("alert-template");
  setText(node.querySelector("bdi"), whoOf(alert));
  setAttribute(node.querySelector("a"), "href", linkOf(alert));
  node.querySelector("time").dateTime = new Date(alert.raised_at * 1000).toISOString();
  return node;
}

function drawRow(node, alert, worst) {
  const open = !alert.resolved_at;
  setAttribute(node, "data-worst", worst); // the one that is shown while the panels are folded up
  setAttribute(node, "data-open", open);
  setText(node.querySelector(".mark"), open ? "open" : "resolved");
  setText(node.querySelector("b"), alert.account ? shareText(alert) : plural(alert.total, "violation"));
  node.querySelector("b").title = describe(alert);
  setText(node.querySelector(".what"), denied(alert));
  const since = timeText(alert.raised_at);
  setText(node.querySelector("time"), open ? `since ${since}` : `${since} to ${timeText(alert.resolved_at)}`);
}
