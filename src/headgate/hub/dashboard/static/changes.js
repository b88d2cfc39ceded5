// What the admin can change about an agent: the dialog, and the hub's admin API behind it.

import { element, mark, one, say, show, where } from "./dom.js";

const TIERS = ["light", "normal", "heavy"];

/** `token` gives the admin's, `agent` what is known of an agent. */
export class Changes {
  #token;
  #agent;
  #name = "";
  #turn = 0;

  constructor({ token, agent }) {
    this.#token = token;
    this.#agent = agent;
    one("override-tier").replaceChildren(...TIERS.map((tier) => element("option", tier)));
    one("change-close").addEventListener("click", () => one("change").close());
    one("override-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#override();
    });
    const whole = () => encodeURIComponent(this.#name);
    this.#act("remove-override", "Its own limits are removed.", () => this.#ask("DELETE", `rate-limits/${whole()}`));
    this.#act("reset-violations", "Its violations are forgotten.", () => this.#ask("DELETE", `violations/${whole()}`));
    this.#act("toggle-exempt", "", () => this.#exempt(whole()));
  }

  /** Show the dialog for an agent. */
  async open(name) {
    this.#name = name;
    say(one("change-agent"), name);
    for (const id of ["change-error", "change-done"]) say(one(id), "");
    one("override-form").reset();
    one("override-tier").value = this.#agent(name)?.usage?.tier ?? TIERS[0];
    this.draw();
    one("change").showModal();
    await this.#try("", () => {});
  }

  close() {
    one("change").close();
  }

  /** The card has changed: so may what can be done. */
  draw() {
    const agent = this.#agent(this.#name);
    const remove = one("remove-override");
    if (!agent?.override && document.activeElement === remove) one("override-limit").focus();
    show(remove, Boolean(agent?.override));
    const title = agent?.exempt ? "It is exempt: none of these holds" : "What holds now; its own limits are marked";
    say(one("limits-title"), title);
    say(one("toggle-exempt"), agent?.exempt ? "Hold to limits again" : "Exempt from limits");
  }

  #act(id, done, work) {
    one(id).addEventListener("click", () => this.#try(done, work));
  }

  async #override() {
    const [tier, channel, limit] = ["tier", "channel", "limit"].map((part) => one(`override-${part}`).value.trim());
    const limits = { [tier]: limit };
    const body = channel ? { [channel]: limits } : limits;
    const set = () => this.#ask("PUT", `rate-limits/${encodeURIComponent(this.#name)}`, body);
    await this.#try(`It has its own limit now: ${channel || "every channel"}, ${tier}, ${limit}.`, set);
  }

  async #exempt(name) {
    if (this.#agent(this.#name)?.exempt) {
      await this.#ask("DELETE", `rate-limits/whitelist/${name}`);
      return "It is held to its limits again.";
    }
    await this.#ask("POST", "rate-limits/whitelist", { agent_id: this.#name });
    return "It is exempt: everything passes.";
  }

  /** Do something and say what came of it, with the limits that hold then, unless something else was done since. */
  async #try(done, work) {
    const turn = ++this.#turn;
    for (const id of ["change-error", "change-done"]) say(one(id), "");
    try {
      const said = await work();
      const limits = await this.#ask("GET", "rate-limits");
      if (turn !== this.#turn) return;
      this.#tabulate(limits);
      say(one("change-done"), typeof said === "string" ? said : done);
    } catch (error) {
      if (turn === this.#turn) say(one("change-error"), error.message);
    }
  }

  #tabulate({ defaults, overrides }) {
    const channels = Object.keys(defaults);
    const own = overrides[this.#name] ?? {};
    const heads = ["Tier", ...channels].map((text) => element("th", text));
    for (const head of heads) head.scope = "col";
    one("limits-head").replaceChildren(...heads);
    const rows = TIERS.map((tier) => {
      const row = element("tr");
      const head = element("th", tier);
      head.scope = "row";
      row.append(head, ...channels.map((channel) => cell(own[channel]?.[tier], defaults[channel][tier])));
      return row;
    });
    one("limits-rows").replaceChildren(...rows);
    const choice = one("override-channel");
    if (choice.options.length !== channels.length + 1) {
      choice.replaceChildren(...["", ...channels].map((channel) => new Option(channel || "every channel", channel)));
    }
  }

  async #ask(method, path, body) {
    let answer;
    try {
      answer = await fetch(where(`api/admin/${path}`), {
        method,
        headers: { Authorization: `Bearer ${this.#token()}` },
        body: body && JSON.stringify(body),
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw new Error("The hub can't be reached. Try again when the dashboard is live.");
    }
    const said = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(said.detail ?? `expected an answer from the hub, got status ${answer.status}`);
    return said;
  }
}

function cell(own, ordinary) {
  const node = element("td", own ?? ordinary);
  if (own) {
    const badge = element("span", "own");
    badge.className = "badge own";
    node.append(" ", badge);
  }
  mark(node, "data-own", Boolean(own));
  return node;
}
