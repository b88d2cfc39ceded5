import { RelayError } from "./errors.js";
import type { Envelope } from "./gen/headgate/v1/envelope_pb.js";
import { type CloseInfo, Connection, type HttpAnswer } from "./connection.js";
import { backoff, jitter, toldWait } from "./backoff.js";
import type { Disconnected, RateLimited, Settings } from "./options.js";

/** The events of a reconnecting connection. */
export interface ReconnectListener {
  /** There is a connection, and the hub has accepted this client. */
  connected(): void;
  received(envelope: Envelope): void;
  /** A message came that can't be read, of so many bytes or characters. */
  unreadable(size: number): void;
  /** The connection is lost; nothing that was sent over it will be answered. */
  disconnected(close: CloseInfo): void;
  /** The hub has denied a connection for a while. */
  rateLimited(denial: RateLimited): void;
  /** There will be another attempt. */
  retrying(loss: Disconnected): void;
  /** The hub refuses this client for good: there will be no other attempt. */
  refused(error: RelayError): void;
}

const LASTING_MS = 30_000; // a connection that has lasted longer was of use
const CLOSE_TIMEOUT_MS = 1000;
const ABNORMAL = 1006;
const OURS = 4000; // the close code of connections ended here: codes from 4000 on are free for applications

/**
 * A connection to a relay that is made again whenever it is lost, until it is closed or the hub refuses.
 *
 * Before each attempt it waits: as long as the hub has asked for, and never less than the backoff.
 */
export class ReconnectingConnection {
  readonly #settings: Settings;
  readonly #listener: ReconnectListener;
  #connection: Connection | undefined;
  #failures = 0; // in a row
  #welcomedAt: number | undefined;
  #toldMs: number | undefined; // how long the hub has asked to wait
  #stopTimer: (() => void) | undefined; // for WELCOME, or for the next connection
  readonly #closed: Promise<void>;
  #ended: () => void = () => undefined; // resolves it
  #closing = false; // whether there will be no other attempt

  constructor(settings: Settings, listener: ReconnectListener) {
    this.#settings = settings;
    this.#listener = listener;
    this.#closed = new Promise((resolve) => (this.#ended = resolve));
    this.#connect();
  }

  /** Whether anything can be sent. */
  get isConnected(): boolean {
    return this.#connection?.welcomed ?? false;
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#connection?.send(frame);
  }

  /** The connection was of use: the backoff starts again. */
  worked(): void {
    this.#failures = 0;
  }

  /** Ends the current connection. */
  abandon(reason: string): void {
    this.#connection?.abandon(OURS, reason);
  }

  /** Closes for good. Resolves when the other side has closed too, or after a short time. */
  close(): Promise<void> {
    const connection = this.#connection;
    if (!this.#closing) {
      this.#closing = true; // before anything else, since a WebSocket may be closed at once
      this.#stopTimer?.();
      const abandon = (): void => connection?.abandon(OURS, "no answer to the close");
      this.#stopTimer = connection && this.#settings.after(CLOSE_TIMEOUT_MS, abandon);
      connection?.close();
    }
    if (this.#connection === undefined) {
      this.#ended();
    }
    return this.#closed;
  }

  #connect(): void {
    const { url, address, token, WebSocket, answerWithinMs, now, after } = this.#settings;
    this.#welcomedAt = undefined;
    this.#toldMs = undefined;
    try {
      this.#connection = new Connection(WebSocket, url, address, token, {
        welcomed: () => {
          if (this.#closing) {
            return; // the timer is that of the close: `ws` still hands over what comes meanwhile
          }
          this.#stopTimer?.();
          this.#welcomedAt = now();
          this.#listener.connected();
        },
        refused: (answer) => this.#refused(answer),
        received: (envelope) => this.#listener.received(envelope),
        unreadable: (size) => this.#listener.unreadable(size),
        ended: (close) => this.#lost(close),
      });
    } catch (error) {
      this.#lost({ code: ABNORMAL, reason: String(error) });
      return;
    }
    this.#stopTimer = after(answerWithinMs, () => this.abandon(`no WELCOME within ${answerWithinMs} ms`));
  }

  #refused(answer: Envelope): void {
    const { case: kind, value } = answer.payload;
    if (kind === "error" && (value.code === "unauthorized" || value.code === "invalid")) {
      void this.close();
      this.#listener.refused(new RelayError(value.code, value.detail));
    } else if (kind === "rateLimited") {
      const waitMs = toldWait(Number(value.retryAfterMs));
      this.#toldMs = waitMs;
      this.#listener.rateLimited({ waitMs, reason: value.reason, id: "" });
      this.abandon(`denied for ${waitMs} ms: ${value.reason}`);
    } else {
      this.abandon(kind === "error" ? `${value.code}: ${value.detail}` : "expected WELCOME, got something else");
    }
  }

  #lost(close: CloseInfo): void {
    const { code, reason, http } = close;
    this.#stopTimer?.();
    this.#connection = undefined;
    this.#listener.disconnected(close);
    if (this.#closing) {
      this.#ended();
      return;
    }
    const error = http && refusal(http);
    if (error !== undefined) {
      void this.close();
      this.#listener.refused(error);
      return;
    }
    const told = /retry in (\d+) ms/.exec(reason)?.[1];
    if (http !== undefined) {
      this.#toldMs = retryAfterMs(http.retryAfter);
    } else if (told !== undefined) {
      this.#toldMs = toldWait(Number(told));
    }
    const retryInMs = this.#pause();
    this.#listener.retrying({ code, reason, retryInMs });
    this.#connectAt(this.#settings.now() + retryInMs);
  }

  #connectAt(moment: number): void {
    const { now, after } = this.#settings;
    this.#stopTimer = after(moment - now(), () => {
      if (now() < moment) {
        this.#connectAt(moment); // timers may be early
      } else {
        this.#connect();
      }
    });
  }

  /** How long to wait before the next attempt: the larger of the wait that the hub has asked for, and the backoff. */
  #pause(): number {
    const { now, random } = this.#settings;
    if (this.#welcomedAt !== undefined && now() - this.#welcomedAt > LASTING_MS) {
      this.worked();
    }
    this.#failures += 1;
    const told = this.#toldMs === undefined ? 0 : this.#toldMs + jitter(this.#toldMs, this.#settings);
    return Math.max(told, backoff(this.#failures, random));
  }
}

const PASSING = [408, 425, 429]; // statuses, besides those from 500 on, after which another attempt may succeed

/** The error of a client that was refused in HTTP; undefined if another attempt may succeed. */
function refusal({ status, body }: HttpAnswer): RelayError | undefined {
  if (PASSING.includes(status) || status >= 500) {
    return undefined;
  }
  try {
    const { error, detail } = JSON.parse(body) as { error: unknown; detail: unknown };
    if (typeof error === "string" && typeof detail === "string") {
      return new RelayError(error, detail.slice(0, 1000));
    }
  } catch {
    // It is the body of another server.
  }
  return new RelayError(`status_${status}`, "no hub answers at this address; check the URL");
}

/** The wait that `Retry-After` asks for, in seconds or by a date; undefined if it is neither. */
function retryAfterMs(value: string): number | undefined {
  const until = / GMT$/.test(value) ? (Date.parse(value) - Date.now()) / 1000 : NaN;
  const seconds = /^\d+(\.\d+)?$/.test(value) ? Number(value) : until;
  return Number.isFinite(seconds) ? toldWait(Math.ceil(seconds) * 1000) : undefined;
}
