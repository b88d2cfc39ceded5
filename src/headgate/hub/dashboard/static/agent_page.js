// The page of one agent: what it does, what it is denied, its limits and connections. It is fetched again while open.

import { ceiling, Spark } from "./charts.js";
import { byId, element, figures, fillRows, fromTemplate, plural, rateText, setAttribute, setCount, setText, setVisible, spanText, timeText } from "./dom.js";
import { amountText, briefText, budgetOf, drawBudget, resetText, resourceText } from "./budget.js";
import { drawMeter, drawState, stateNode, usedText } from "./state.js";

const REFRESH_MS = 2000; // between two requests

const actionText = ({ channel, action }) => `${channel} ${action}`.trim() || "a tier, by no action";

/** `redraw` is called when the hub has answered. */
export class AgentPage {
  name = "";
  #agents;
  #api;
  #redraw;
  #detail = null; // as the hub has answered
  #asked = 0;
  #unknown = false; // the hub knows no such agent
  #asking = null; // the present request
  #state = stateNode();
  #spark;

  constructor(agents, api, redraw) {
    [this.#agents, this.#api, this.#redraw] = [agents, api, redraw];
    byId("agent-state").append(this.#state);
    this.#spark = new Spark(byId("agent-chart"), agents);
  }

  /** What is known of the agent: what the hub has answered, and what has changed since. */
  get agent() {
    const own = this.#detail && { override: Object.keys(this.#detail.override).length > 0 }; // a card has no limits
    return { ...this.#detail, ...own, ...this.#agents.get(this.name) };
  }

  /** Show an agent from now on; "" for none. */
  open(name) {
    [this.name, this.#detail, this.#asked, this.#asking, this.#unknown] = [name, null, 0, null, false];
    setText(byId("agent-name"), name);
    setText(byId("agent-error"), "");
  }

  /** Fetch the agent again, now. */
  async refresh() {
    const name = this.name;
    this.#asked = Date.now();
    const asking = (this.#asking = this.#api.fetch("GET", `agents/${encodeURIComponent(name)}`));
    try {
      const found = await asking;
      if (name !== this.name || asking !== this.#asking) return;
      [this.#detail, this.#unknown] = [found, false];
      setText(byId("agent-error"), "");
    } catch (error) {
      if (name !== this.name) return;
      [this.#detail, this.#unknown] = [error.status === 404 ? null : this.#detail, error.status === 404];
      setText(byId("agent-error"), error.message);
    } finally {
      if (asking === this.#asking) this.#asking = null;
    }
    if (name === this.name) this.#redraw();
  }

  /** Draw it. It is fetched again if that was a while ago. */
  draw() {
    const { signedIn } = this.#api;
    const due = !this.#asking && Math.abs(Date.now() - this.#asked) > REFRESH_MS;
    if (signedIn && due && !(this.#unknown && !this.#agents.get(this.name))) this.refresh();
    setVisible(byId("agent-anonymous"), !signedIn);
    setVisible(byId("agent-detail"), Boolean(this.#detail));
    this.#drawTraffic(this.#agents.get(this.name));
    const { agent } = this;
    const known = "connected" in agent;
    setVisible(byId("agent-state"), known);
    setVisible(byId("agent-body"), known);
    if (!known) return;
    drawState(this.#state, agent);
    setText(byId("agent-denied"), figures.format(agent.denied_per_minute ?? 0));
    setText(byId("agent-violations"), figures.format(agent.violations));
    setText(byId("agent-violations-hour"), figures.format(agent.violations_last_hour));
    this.tick();
    if (this.#detail) this.#drawDetail(this.#detail);
  }

  /** Count the wait down. */
  tick() {
    const wait = this.#agents.get(this.name)?.wait ?? 0;
    setText(byId("agent-wait"), wait ? spanText(wait) : "–");
  }

  #drawTraffic(live) {
    setText(byId("agent-rate"), live ? rateText(this.#agents.rate(live)) : "0");
    setVisible(byId("agent-traffic"), Boolean(live));
    setVisible(byId("no-traffic"), !live);
    if (!live) return;
    const top = ceiling(Math.max(...live.passed.map((passed, at) => passed + live.denied[at])) / this.#agents.seconds);
    setText(byId("agent-peak"), `${figures.format(top)} per second`);
    this.#spark.draw(live, top * this.#agents.seconds);
  }

  #drawDetail(detail) {
    drawBlock(detail);
    drawTable("denied-actions", detail.denied_actions, (one) => {
      return [actionText(one), one.tier, figures.format(one.last_minute), figures.format(one.last_hour)];
    });
    drawTable("denials", detail.denials, (one) => {
      const wait = spanText(one.retry_after_ms / 1000);
      return [timeText(one.at), actionText(one), one.tier, one.address || "unknown", wait];
    });
    drawTable("connections", detail.connections, (one) => [one.kind, one.address || "unknown", timeText(one.since)]);
    const registered = detail.registered_at === null ? "yes" : timeText(detail.registered_at);
    setText(byId("agent-registered"), detail.registered ? registered : "no agent of this name");
    setText(byId("agent-token"), detail.revoked ? "revoked" : detail.registered ? "valid" : "none");
    setAttribute(byId("agent-token"), "data-some", detail.revoked);
    setText(byId("agent-role"), detail.role || "none");
    setText(byId("agent-sessions"), figures.format(detail.sessions));
    setText(byId("agent-task"), detail.tasks.held ?? "none");
    setText(byId("agent-created"), plural(detail.tasks.created, "unfinished task"));
    drawLimits(detail);
    drawAccounts(detail);
  }
}

/** What the accounts above the agent have left, and what it holds. */
function drawAccounts({ account, account_limits: limits, holds }) {
  setVisible(byId("agent-accounts"), limits.length > 0 || holds.length > 0 || Boolean(account && !account.startsWith("-/")));
  setText(byId("agent-path"), account);
  setVisible(byId("account-limits"), limits.length > 0);
  setVisible(byId("no-account-limits"), !limits.length);
  const body = byId("account-limits").tBodies[0];
  setCount(body, limits.length, accountRow);
  limits.forEach((limit, at) => {
    const row = body.rows[at];
    setText(row.cells[0].firstElementChild, limit.account);
    row.cells[0].title = limit.level;
    const used = row.querySelector(".use");
    const share = drawBudget(used.firstElementChild, budgetOf(limit));
    setText(used.lastElementChild, share);
    setText(used.previousElementSibling, briefText(limit, share));
    const texts = [amountText(limit.spent), amountText(limit.held), amountText(limit.left), limit.limit, resetText(limit)];
    setText(row.cells[1], resourceText(limit));
    texts.forEach((text, place) => setText(row.cells[place + 3], text));
  });
  drawTable("holds", holds, ({ hold_id: id, session, tool, state, costs, lease_left: left }) => {
    const reserved = Object.entries(costs).map(([resource, cost]) => `${amountText(cost)} ${resource}`);
    const lease = state === "open" ? spanText(left) : "expired";
    return [id, session || "–", tool || "–", reserved.join(", "), lease];
  });
}

function accountRow() {
  const row = fromTemplate("account-template");
  setAttribute(row, "data-first", true); // each names its account
  row.cells[0].replaceChildren(element("bdi"));
  row.cells[0].firstElementChild.dir = "auto";
  row.lastElementChild.remove(); // limits are changed in the list of accounts
  return row;
}

function drawBlock({ blocked, blocked_until: until, blocked_reason: reason }) {
  setVisible(byId("agent-blocked"), blocked);
  const end = until === null ? "until it is unblocked" : `until ${timeText(until)}`;
  setText(byId("agent-blocked"), `Blocked ${end}: everything it asks for is denied.${reason ? ` Reason: ${reason}` : ""}`);
}

/** A table, or a line that says that there is nothing. */
function drawTable(id, found, row) {
  setVisible(byId(id), found.length > 0);
  setVisible(byId(`no-${id}`), !found.length);
  fillRows(byId(id).tBodies[0], found.map(row));
}

function drawLimits({ buckets, exempt, session_limit: session, session_override: own }) {
  const title = exempt ? "It is exempt: none of these applies." : "In effect, and what is used of them now.";
  setText(byId("limits-title"), title);
  const body = byId("limits").tBodies[0];
  setCount(body, buckets.length + 1, () => fromTemplate("limit-template"));
  buckets.forEach((bucket, at) => {
    const [name, bar, used, limit] = body.rows[at].cells;
    setText(name, `${bucket.channel} ${bucket.tier}`);
    setVisible(bar.firstElementChild, true);
    drawMeter(bar.firstElementChild, bucket);
    setText(used, usedText(bucket));
    drawLimit(limit, bucket.limit, bucket.own);
  });
  const [name, bar, used, limit] = body.rows[buckets.length].cells;
  setText(name, "each session");
  setVisible(bar.firstElementChild, false);
  setText(used, "");
  drawLimit(limit, session, own !== null);
}

function drawLimit(cell, text, own) {
  const [limit, mark] = cell.children;
  setText(limit, text);
  setVisible(mark, own);
}
