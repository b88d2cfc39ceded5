// The admin's changes to an agent: the dialog, and the requests to the admin API.

import { element, setAttribute, byId, setText, setVisible, hubUrl } from "./dom.js";

/** `token` returns the admin's token, `agent` the card of an agent. */
export class Changes {
  #token;
  #agent;
  #name = "";
  #request = 0;

  constructor({ token, agent }) {
    this.#token = token;
    this.#agent = agent;
    byId("change-close").addEventListener("click", () => byId("change").close());
    byId("override-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#override();
    });
    const escaped = () => encodeURIComponent(this.#name);
    this.#act("remove-override", "Its override is removed.", () => this.#fetch("DELETE", `rate-limits/${escaped()}`));
    this.#act("reset-violations", "Its violations are reset.", () => this.#fetch("DELETE", `violations/${escaped()}`));
    this.#act("toggle-exempt", "", () => this.#exempt(escaped()));
  }

  /** Show the dialog for an agent. */
  async open(name) {
    this.#name = name;
    setText(byId("change-agent"), name);
    for (const id of ["change-error", "change-done"]) setText(byId(id), "");
    byId("override-form").reset();
    this.#chooseTier(this.#agent(name)?.usage?.tier);
    this.draw();
    byId("change").showModal();
    await this.#try("", () => {});
  }

  close() {
    byId("change").close();
  }

  /** Update the actions after a change of the card. */
  draw() {
    const agent = this.#agent(this.#name);
    const remove = byId("remove-override");
    if (!agent?.override && document.activeElement === remove) byId("override-limit").focus();
    setVisible(remove, Boolean(agent?.override));
    const title = agent?.exempt ? "It is exempt: none of these applies" : "Limits in effect; its own are marked";
    setText(byId("limits-title"), title);
    setText(byId("toggle-exempt"), agent?.exempt ? "Hold to limits again" : "Exempt from limits");
  }

  /** Choose a tier in the form, also one of the policy's own before the hub has listed them. */
  #chooseTier(tier) {
    if (!tier) return;
    const choice = byId("override-tier");
    const known = [...choice.options].map((option) => option.value);
    if (!known.includes(tier)) offer(choice, [...known, tier]);
    choice.value = tier;
  }

  #act(id, done, work) {
    byId(id).addEventListener("click", () => this.#try(done, work));
  }

  async #override() {
    const [tier, channel, limit] = ["tier", "channel", "limit"].map((part) => byId(`override-${part}`).value.trim());
    const limits = { [tier]: limit };
    const body = channel ? { [channel]: limits } : limits;
    const set = () => this.#fetch("PUT", `rate-limits/${encodeURIComponent(this.#name)}`, body);
    await this.#try(`It now has its own limit: ${channel || "every channel"}, ${tier}, ${limit}.`, set);
  }

  async #exempt(name) {
    if (this.#agent(this.#name)?.exempt) {
      await this.#fetch("DELETE", `rate-limits/whitelist/${name}`);
      return "It is held to its limits again.";
    }
    await this.#fetch("POST", "rate-limits/whitelist", { agent_id: this.#name });
    return "It is exempt: everything passes.";
  }

  /** Do something, and show its result and the limits in effect, unless another action was started since. */
  async #try(done, work) {
    const request = ++this.#request;
    for (const id of ["change-error", "change-done"]) setText(byId(id), "");
    try {
      const result = await work();
      const limits = await this.#fetch("GET", "rate-limits");
      if (request !== this.#request) return;
      this.#tabulate(limits);
      setText(byId("change-done"), typeof result === "string" ? result : done);
    } catch (error) {
      if (request === this.#request) setText(byId("change-error"), error.message);
    }
  }

  #tabulate({ defaults, overrides }) {
    const channels = Object.keys(defaults);
    const tiers = Object.keys(defaults[channels[0]]);
    const own = overrides[this.#name] ?? {};
    const heads = ["Tier", ...channels].map((text) => element("th", text));
    for (const head of heads) head.scope = "col";
    byId("limits-head").replaceChildren(...heads);
    const rows = tiers.map((tier) => {
      const row = element("tr");
      const head = element("th", tier);
      head.scope = "row";
      row.append(head, ...channels.map((channel) => cell(limitOf(own[channel], tier), defaults[channel][tier])));
      return row;
    });
    byId("limits-rows").replaceChildren(...rows);
    offer(byId("override-tier"), tiers);
    offer(byId("override-channel"), ["", ...channels], "every channel");
  }

  async #fetch(method, path, body) {
    let answer;
    try {
      answer = await fetch(hubUrl(`api/admin/${path}`), {
        method,
        headers: { Authorization: `Bearer ${this.#token()}` },
        body: body && JSON.stringify(body),
        credentials: "omit",
        redirect: "error",
      });
    } catch {
      throw new Error("The hub can't be reached. Try again when the dashboard is live.");
    }
    const found = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(found.detail ?? `expected an answer from the hub, got status ${answer.status}`);
    return found;
  }
}

/** Offer these values, and keep the choice if it is among them. */
function offer(choice, values, nameOfEmpty = "") {
  const offered = [...choice.options].map((option) => option.value);
  if (offered.length === values.length && values.every((value, place) => value === offered[place])) return;
  const chosen = choice.value;
  choice.replaceChildren(...values.map((value) => new Option(value || nameOfEmpty, value)));
  if (values.includes(chosen)) choice.value = chosen;
}

/** The limit of a tier, if there is one. A tier may have the name of a property of every object. */
function limitOf(limits, tier) {
  return limits && Object.hasOwn(limits, tier) ? limits[tier] : undefined;
}

function cell(own, ordinary) {
  const node = element("td", own ?? ordinary);
  if (own) {
    const badge = element("span", "own");
    badge.className = "badge own";
    node.append(" ", badge);
  }
  setAttribute(node, "data-own", Boolean(own));
  return node;
}
