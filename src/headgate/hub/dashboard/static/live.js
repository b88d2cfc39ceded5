// The socket to the hub, reopened whenever it is lost.

import { hubUrl } from "./dom.js";

const SILENCE = 5000; // ms: the hub sends an update each second
const FIRST = 200;
const LONGEST = 5000;
const RETRIED = "too_many_connections"; // any other error is final

/**
 * Calls `onFrame` with each snapshot and update, `onState` with "connecting", "live" or "lost" and the hub's reason,
 * and `onRefused` with the error frame when the hub refuses the token. After that it waits for `open`.
 */
export class Live {
  #onFrame;
  #onState;
  #onRefused;
  #token = "";
  #socket = null;
  #timer = 0; // of the next attempt
  #lastFrame = 0; // when it came
  #attempts = 0;
  #wait = null; // ms that the hub asked us to wait
  #reason = "";

  constructor({ onFrame, onState, onRefused }) {
    this.#onFrame = onFrame;
    this.#onState = onState;
    this.#onRefused = onRefused;
    setInterval(() => this.#checkSilence(), 1000);
    document.addEventListener("visibilitychange", () => this.#hurry());
    addEventListener("online", () => this.#hurry());
  }

  /** Connect with this token, or without one if it is "". */
  open(token) {
    this.close();
    this.#token = token;
    this.#attempts = 0;
    this.#onState("connecting", "");
    this.#connect();
  }

  /** Disconnect. */
  close() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const socket = this.#socket;
    this.#socket = null;
    socket?.close();
  }

  #connect() {
    const url = hubUrl("ws/dashboard");
    url.protocol = url.protocol.replace("http", "ws");
    const socket = (this.#socket = new WebSocket(url));
    this.#timer = 0;
    this.#lastFrame = performance.now();
    this.#wait = null;
    this.#reason = "";
    socket.onopen = () => socket.send(JSON.stringify({ type: "watch", ...(this.#token && { token: this.#token }) }));
    socket.onmessage = ({ data }) => socket === this.#socket && this.#receive(JSON.parse(data));
    socket.onclose = () => socket === this.#socket && this.#lost();
  }

  #receive(frame) {
    this.#lastFrame = performance.now();
    if (frame.type === "error" && frame.error !== RETRIED) {
      this.close();
      this.#onRefused(frame);
    } else if (frame.type === "error") {
      this.#reason = frame.detail;
    } else if (frame.type === "going_away") {
      this.#wait = Math.min(frame.retry_after_ms, LONGEST);
    } else if (frame.type === "snapshot") {
      this.#attempts = 0;
      this.#onState("live", "");
      this.#onFrame(frame);
    } else if (frame.type === "update") {
      this.#onFrame(frame);
    }
  }

  #lost() {
    this.close();
    const backoff = Math.min(FIRST * 2 ** this.#attempts++, LONGEST);
    this.#timer = setTimeout(() => this.#connect(), this.#wait ?? backoff * (0.5 + Math.random() / 2));
    this.#onState("lost", this.#reason);
  }

  /** Treat a silent socket as lost. */
  #checkSilence() {
    if (this.#socket && performance.now() - this.#lastFrame > SILENCE) this.#lost();
  }

  /** The page is visible again, or the network is back: reconnect at once. */
  #hurry() {
    if (this.#timer && !document.hidden) {
      clearTimeout(this.#timer);
      this.#connect();
    }
  }
}
