// What an admin changes about an account: one of its limits.

import { byId, setText, setVisible } from "./dom.js";
import { resourceText } from "./budget.js";

/** `api` sends the change to the hub. */
export class AccountChanges {
  #api;
  #asked = null; // the button that has asked
  #sending = 0;

  constructor(api) {
    this.#api = api;
    byId("accounts").addEventListener("click", ({ target }) => {
      const button = target.closest("button.edit");
      if (button) this.#open(button);
    });
    byId("account-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(byId("account-limit").value.trim());
    });
    byId("account-remove").addEventListener("click", () => this.#send(null));
    byId("account-cancel").addEventListener("click", () => this.close());
    byId("account-form").addEventListener("keydown", ({ key }) => key === "Escape" && this.close());
  }

  /** Close the form, and go back to where it was asked for. */
  close() {
    this.#sending++;
    if (byId("account-form").hidden) return;
    setVisible(byId("account-form"), false);
    if (this.#asked?.isConnected) this.#asked.focus();
  }

  #open(button) {
    this.#asked = button;
    const { path, limit } = button.dataset;
    setText(byId("account-what"), resourceText(button.dataset));
    setText(byId("account-path"), path);
    byId("account-limit").value = limit;
    setText(byId("account-error"), "");
    setText(byId("account-done"), "");
    setVisible(byId("account-form"), true);
    byId("account-limit").focus();
  }

  async #send(limit) {
    const { path, resource, tool } = this.#asked.dataset;
    const changed = { [resource]: limit };
    const sending = ++this.#sending;
    setText(byId("account-error"), "");
    try {
      await this.#api.fetch("PUT", `accounts/${encodeURIComponent(path)}`, tool ? { tools: { [tool]: changed } } : changed);
      if (sending !== this.#sending) return;
      this.close();
      setText(byId("account-done"), limit === null ? "It has the limit of the policy again." : "The limit is set.");
    } catch (error) {
      if (sending !== this.#sending) return;
      setText(byId("account-error"), error.message);
      byId("account-limit").focus();
    }
  }
}
