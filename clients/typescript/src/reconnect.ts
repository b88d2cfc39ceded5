import { RelayError } from "./errors.js";
import type { Envelope } from "./gen/headgate/v1/envelope_pb.js";
import { type CloseInfo, Connection } from "./connection.js";
import type { Disconnected, RateLimited, Settings } from "./options.js";

/** The events of a reconnecting connection. */
export interface ReconnectListener {
  /** There is a connection, and the hub has accepted this client. */
  connected(): void;
  received(envelope: Envelope): void;
  /** The connection is lost; nothing that was sent over it will be answered. */
  disconnected(close: CloseInfo): void;
  /** The hub has denied a connection for a while. */
  rateLimited(denial: RateLimited): void;
  /** There will be another attempt. */
  retrying(loss: Disconnected): void;
  /** The hub refuses this client for good: there will be no other attempt. */
  refused(error: RelayError): void;
}

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 30_000;
const CLOSE_TIMEOUT_MS = 1000;
const OURS = 4000; // the close code of connections ended here: codes from 4000 on are free for applications

/**
 * A connection to a relay that is made again whenever it is lost, until it is closed or the hub refuses.
 *
 * Before each attempt it waits: as long as the hub has asked for, otherwise twice as long each time, from a quarter of a
 * second to half a minute, less up to a half at random.
 */
export class ReconnectingConnection {
  readonly #settings: Settings;
  readonly #listener: ReconnectListener;
  #connection: Connection | undefined;
  #failures = 0; // in a row
  #startedAt = 0;
  #stopTimer: (() => void) | undefined; // for WELCOME, or for the next connection
  #ended: (() => void) | undefined; // while closing

  constructor(settings: Settings, listener: ReconnectListener) {
    this.#settings = settings;
    this.#listener = listener;
    this.#connect();
  }

  /** Whether anything can be sent. */
  get isConnected(): boolean {
    return this.#connection?.welcomed ?? false;
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#connection?.send(frame);
  }

  /** Ends the current connection. */
  abandon(reason: string): void {
    this.#connection?.abandon(OURS, reason);
  }

  /** Closes for good. Resolves when the other side has closed too, or after a short time. */
  async close(): Promise<void> {
    this.#stopTimer?.();
    const connection = this.#connection;
    if (connection !== undefined) {
      const stop = this.#settings.after(CLOSE_TIMEOUT_MS, () => connection.abandon(OURS, "no answer to the close"));
      await new Promise<void>((resolve) => {
        this.#ended = resolve;
        connection.close();
      });
      stop();
    }
  }

  #connect(): void {
    const { url, address, token, WebSocket, answerWithinMs, now, after } = this.#settings;
    this.#startedAt = now();
    this.#connection = new Connection(WebSocket, url, address, token, {
      welcomed: () => {
        this.#stopTimer?.();
        this.#listener.connected();
      },
      refused: (answer) => this.#refused(answer),
      received: (envelope) => this.#listener.received(envelope),
      ended: (close) => this.#lost(close),
    });
    this.#stopTimer = after(answerWithinMs, () => this.abandon(`no WELCOME within ${answerWithinMs} ms`));
  }

  #refused(answer: Envelope): void {
    const { case: kind, value } = answer.payload;
    if (kind === "error" && (value.code === "unauthorized" || value.code === "invalid")) {
      void this.close();
      this.#listener.refused(new RelayError(value.code, value.detail));
    } else if (kind === "rateLimited") {
      const waitMs = Number(value.retryAfterMs);
      this.#listener.rateLimited({ waitMs, reason: value.reason, id: "" });
      this.abandon(`denied; retry in ${waitMs} ms`);
    } else {
      this.abandon(kind === "error" ? `${value.code}: ${value.detail}` : "expected WELCOME, got something else");
    }
  }

  #lost(close: CloseInfo): void {
    this.#stopTimer?.();
    this.#connection = undefined;
    this.#listener.disconnected(close);
    if (this.#ended !== undefined) {
      this.#ended();
      return;
    }
    const retryInMs = this.#pause(close);
    this.#listener.retrying({ ...close, retryInMs });
    this.#stopTimer = this.#settings.after(retryInMs, () => this.#connect());
  }

  /** How long to wait before the next attempt. */
  #pause({ reason }: CloseInfo): number {
    const { now, random, jitter } = this.#settings;
    const asked = /retry in (\d{1,12}) ms/.exec(reason)?.[1];
    if (asked !== undefined) {
      return Number(asked) * (1 + random() * jitter);
    }
    const longest = (failures: number): number => Math.min(FIRST_PAUSE_MS * 2 ** failures, LONGEST_PAUSE_MS);
    if (now() - this.#startedAt > longest(this.#failures)) {
      this.#failures = 0; // the connection lasted for a while
    }
    const pause = longest(this.#failures) * (1 - random() / 2);
    this.#failures += 1;
    return pause;
  }
}
