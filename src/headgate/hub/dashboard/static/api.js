// Requests to the hub's API.

import { hubUrl } from "./dom.js";

/** `token` returns the token of the user. An error has a message to show, and `status` if the hub has answered. */
export class HubApi {
  #token;

  constructor(token) {
    this.#token = token;
  }

  /** Whether there is a user: a public dashboard needs none. */
  get signedIn() {
    return Boolean(this.#token());
  }

  /** The answer to a request. */
  async fetch(method, path, body) {
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
    if (answer.ok) return found;
    const detail = found.detail ?? `expected an answer from the hub, got status ${answer.status}`;
    throw Object.assign(new Error(detail), { status: answer.status });
  }
}
