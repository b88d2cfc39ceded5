// What an admin changes on the page of an agent. Errors stand beside their field; dangerous actions ask once, in place.

import { byId, plural, setAttribute, setText, setVisible } from "./dom.js";

const SESSION = "session"; // beside the tiers

/** `page` shows the agent. */
export class Changes {
  #api;
  #page;
  #request = 0;
  #confirmed = null; // what is done once it is confirmed
  #asked = null; // the button that has asked

  constructor(api, page) {
    [this.#api, this.#page] = [api, page];
    this.#onClick("unblock", () => this.#send("DELETE", "agents/NAME/block", "It is unblocked."));
    this.#onClick("toggle-exempt", () => this.#exempt());
    this.#onClick("reset-violations", () => this.#send("DELETE", "violations/NAME", "Its violations are reset."));
    this.#onClick("remove-override", () => this.#send("DELETE", "rate-limits/NAME", "Its override is removed."), "override");
    this.#onAsk("block", () => this.#open("block-form", "block-reason"));
    this.#onAsk("disconnect", () => this.#askToDisconnect());
    this.#onAsk("revoke", () => this.#askToRevoke());
    this.#onSubmit("confirm", () => this.#try("change", this.#confirmed));
    this.#onSubmit("block-form", () => this.#block());
    this.#onSubmit("override-form", () => this.#override());
    for (const id of ["confirm-cancel", "block-cancel"]) byId(id).addEventListener("click", () => this.cancel());
    byId("actions-panel").addEventListener("keydown", ({ key }) => key === "Escape" && this.cancel());
    byId("block-ends").addEventListener("change", ({ target }) => {
      setVisible(byId("block-at"), target.value === "at");
      if (target.value === "at") byId("block-until").focus();
    });
    byId("override-tier").addEventListener("change", ({ target }) => {
      byId("override-channel").disabled = target.value === SESSION;
    });
  }

  #onClick(id, work, place = "change") {
    byId(id).addEventListener("click", () => {
      this.#close();
      this.#try(place, work);
    });
  }

  #onAsk(id, ask) {
    byId(id).addEventListener("click", () => {
      this.#close();
      this.#clear();
      this.#asked = byId(id);
      setAttribute(byId(id), "aria-expanded", true);
      ask();
    });
  }

  #onSubmit(id, work) {
    byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      work();
    });
  }

  /** Another agent is shown, or none. */
  reset() {
    this.#request++;
    this.#close();
    this.#clear();
    byId("override-form").reset();
    byId("override-channel").disabled = false;
    offer(byId("override-tier"), []);
  }

  /** Draw what can be done. */
  draw(admin) {
    const { agent } = this.#page;
    const usable = admin && "connected" in agent; // else the hub knows no such agent
    for (const id of ["actions-panel", "override-form"]) setVisible(byId(id), usable);
    if (!usable) return;
    const held = document.activeElement;
    setVisible(byId("block"), !agent.blocked);
    setVisible(byId("unblock"), Boolean(agent.blocked));
    setVisible(byId("revoke"), Boolean(agent.registered && !agent.revoked));
    setVisible(byId("remove-override"), Boolean(agent.override || agent.session_override));
    setText(byId("toggle-exempt"), agent.exempt ? "Hold to limits again" : "Exempt from limits");
    if (held.hidden) (held.closest("form")?.querySelector("input") ?? byId("agent-title")).focus();
    this.#offerLimits(agent);
  }

  #offerLimits({ buckets, usage }) {
    if (!buckets) return;
    const [tiers, channels] = ["tier", "channel"].map((part) => [...new Set(buckets.map((bucket) => bucket[part]))]);
    const first = !byId("override-tier").options.length;
    offer(byId("override-tier"), [...tiers, SESSION], new Map([[SESSION, "each session"]]));
    offer(byId("override-channel"), ["", ...channels], new Map([["", "every channel"]]));
    if (first && usage) byId("override-tier").value = usage.tier; // of the bucket nearest to its limit
  }

  // Asking once -------------------------------------------------------------------------------------------------------

  #open(id, focus) {
    setVisible(byId(id), true);
    byId(focus).focus();
  }

  #ask(text, verb, work) {
    this.#confirmed = work;
    setText(byId("confirm-text"), text);
    setText(byId("confirm-yes"), verb);
    this.#open("confirm", "confirm-yes");
  }

  #askToDisconnect() {
    this.#ask("Close its connections? It may connect again.", "Disconnect", async () => {
      const { connections } = await this.#fetch("POST", "agents/NAME/disconnect");
      return `${plural(connections, "connection")} closed.`;
    });
  }

  #askToRevoke() {
    const text = `Revoke its token? It can't connect any more until it has a new one (headgate rotate ${this.#page.name}).`;
    this.#ask(text, "Revoke token", () => this.#send("DELETE", "agents/NAME/token", "Its token is revoked."));
  }

  cancel() {
    const asked = this.#asked;
    this.#close();
    this.#clear();
    asked?.focus();
  }

  #close() {
    for (const id of ["confirm", "block-form"]) setVisible(byId(id), false);
    for (const id of ["block", "disconnect", "revoke"]) setAttribute(byId(id), "aria-expanded", false);
    byId("block-form").reset();
    setVisible(byId("block-at"), false);
    this.#asked = this.#confirmed = null;
  }

  // Changes -----------------------------------------------------------------------------------------------------------

  async #block() {
    const [ends, reason] = [byId("block-ends").value, byId("block-reason").value.trim()];
    const at = new Date(byId("block-until").value).getTime() / 1000;
    this.#clear();
    if (ends === "at" && !(at > Date.now() / 1000)) return this.#show("block-ends", "Choose a time in the future.");
    const until = ends === "at" ? at : ends ? Math.round(Date.now() / 1000) + Number(ends) : null;
    const disconnect = byId("block-disconnect").checked;
    await this.#try("block", async () => {
      await this.#fetch("PUT", "agents/NAME/block", { until, reason });
      if (disconnect) await this.#fetch("POST", "agents/NAME/disconnect");
      return disconnect ? "It is blocked and disconnected." : "It is blocked.";
    });
  }

  async #override() {
    const [tier, channel, limit] = ["tier", "channel", "limit"].map((part) => byId(`override-${part}`).value.trim());
    const below = tier === SESSION ? "" : channel;
    const body = below ? { [below]: { [tier]: limit } } : { [tier]: limit };
    const where = tier === SESSION ? "each session" : `${channel || "every channel"}, ${tier}`;
    await this.#try("override", () => {
      return this.#send("PUT", "rate-limits/NAME", `It now has its own limit: ${where}, ${limit}.`, body);
    });
  }

  async #exempt() {
    if (this.#page.agent.exempt) {
      return this.#send("DELETE", "rate-limits/whitelist/NAME", "It is held to its limits again.");
    }
    const body = { agent_id: this.#page.name };
    return this.#send("POST", "rate-limits/whitelist", "It is exempt: everything passes.", body);
  }

  async #send(method, path, done, body) {
    await this.#fetch(method, path, body);
    return done;
  }

  #fetch(method, path, body) {
    return this.#api.fetch(method, path.replace("NAME", () => encodeURIComponent(this.#page.name)), body);
  }

  /** Do something, and show beside its place what came of it, unless something else was begun since. */
  async #try(place, work) {
    const request = ++this.#request;
    this.#clear();
    try {
      const done = await work();
      if (request !== this.#request) return;
      this.#close();
      setText(byId(place === "override" ? "override-done" : "change-done"), done);
      await this.#page.refresh();
    } catch (error) {
      if (request === this.#request) this.#show(fieldOf(place, error), error.message);
    }
  }

  #show(place, text) {
    setText(byId(`${place}-error`), text);
    const field = byId({ override: "override-limit" }[place] ?? place);
    if (field?.matches("input, select")) {
      setAttribute(field, "aria-invalid", true);
      field.focus();
    }
  }

  #clear() {
    for (const node of byId("agent-page").querySelectorAll(".error, .done")) setText(node, "");
    for (const node of byId("agent-page").querySelectorAll("[aria-invalid]")) node.removeAttribute("aria-invalid");
  }
}

/** Where an error belongs: to a field of the block, or to the form. */
function fieldOf(place, { status, message }) {
  if (place !== "block" || status !== 400) return place;
  return /\breason\b/.test(message) ? "block-reason" : "block-ends";
}

/** Offer these values, and keep the choice if it is among them. */
function offer(choice, values, names = new Map()) {
  const offered = [...choice.options].map((option) => option.value);
  if (offered.length === values.length && values.every((value, place) => value === offered[place])) return;
  const chosen = choice.value;
  choice.replaceChildren(...values.map((value) => new Option(names.get(value) ?? value, value)));
  if (values.includes(chosen)) choice.value = chosen;
}
