// The socket to the hub: opened, listened to, and opened again whenever it is lost.

import { where } from "./dom.js";

const SILENCE = 5000; // ms: the hub says something each second
const FIRST = 200;
const LONGEST = 5000;
const RETRIED = "too_many_connections"; // any other error frame refuses us for good

/**
 * Calls `hear` with each snapshot and update, `tell` with "connecting", "live" or "lost" and what the hub said of it,
 * and `refuse` with the error frame when the hub doesn't let us look. After that it waits for `open`.
 */
export class Live {
  #hear;
  #tell;
  #refuse;
  #token = "";
  #socket = null;
  #timer = 0; // of the next try
  #heard = 0; // when
  #tries = 0;
  #wait = null; // ms that the hub asked us to stay away
  #why = "";

  constructor({ hear, tell, refuse }) {
    this.#hear = hear;
    this.#tell = tell;
    this.#refuse = refuse;
    setInterval(() => this.#listen(), 1000);
    document.addEventListener("visibilitychange", () => this.#hurry());
    addEventListener("online", () => this.#hurry());
  }

  /** Look with this token, or without one if it is "". */
  open(token) {
    this.close();
    this.#token = token;
    this.#tries = 0;
    this.#tell("connecting", "");
    this.#connect();
  }

  /** Look no more. */
  close() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #connect() {
    const url = where("ws/dashboard");
    url.protocol = url.protocol.replace("http", "ws");
    const socket = (this.#socket = new WebSocket(url));
    this.#timer = 0;
    this.#heard = performance.now();
    this.#wait = null;
    this.#why = "";
    socket.onopen = () => socket.send(JSON.stringify({ type: "watch", ...(this.#token && { token: this.#token }) }));
    socket.onmessage = ({ data }) => socket === this.#socket && this.#take(JSON.parse(data));
    socket.onclose = () => socket === this.#socket && this.#lost();
  }

  #take(frame) {
    this.#heard = performance.now();
    if (frame.type === "error" && frame.error !== RETRIED) {
      this.close();
      this.#refuse(frame);
    } else if (frame.type === "error") {
      this.#why = frame.detail;
    } else if (frame.type === "going_away") {
      this.#wait = Math.min(frame.retry_after_ms, LONGEST);
    } else if (frame.type === "snapshot") {
      this.#tries = 0;
      this.#tell("live", "");
      this.#hear(frame);
    } else if (frame.type === "update") {
      this.#hear(frame);
    }
  }

  #lost() {
    this.close();
    const backoff = Math.min(FIRST * 2 ** this.#tries++, LONGEST);
    this.#timer = setTimeout(() => this.#connect(), this.#wait ?? backoff * (0.5 + Math.random() / 2));
    this.#tell("lost", this.#why);
  }

  /** A socket that says nothing is as good as lost. */
  #listen() {
    if (this.#socket && performance.now() - this.#heard > SILENCE) this.#lost();
  }

  /** Somebody looks again, or the network is back: don't wait for the next try. */
  #hurry() {
    if (this.#timer && !document.hidden) {
      clearTimeout(this.#timer);
      this.#connect();
    }
  }
}
