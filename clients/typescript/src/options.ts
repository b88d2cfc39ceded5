import type { Message } from "./client.js";
import { builtInSocketClass, type RelaySocketClass, type Runtime, systemRuntime } from "./runtime.js";

/** An envelope that the hub has denied. It is sent again by itself. */
export interface RateLimited {
  /** How long nothing is sent now, at least. */
  readonly waitMs: number;
  /** Why, in the hub's words. */
  readonly reason: string;
  /** The id of the envelope; empty where it was the connection that was denied. */
  readonly id: string;
}

/** A connection that was lost, or could not be made. */
export interface Disconnected {
  /** The WebSocket's close code. */
  readonly code: number;
  readonly reason: string;
  /** When the next one is tried. */
  readonly retryInMs: number;
}

/** How a client is made. */
export interface RelayOptions {
  /** The agent's id. */
  readonly address: string;
  /** The token that the agent got when it was registered. */
  readonly token: string;
  /** The class of WebSockets: that of the package `ws` where the runtime has none built in. */
  readonly WebSocket?: RelaySocketClass;
  /** Envelopes in the outbox before `send` waits for room; 256. */
  readonly most?: number;
  /** Envelopes in flight at a time; 1, which keeps the order even if one is denied. */
  readonly inFlight?: number;
  /**
   * Bytes of the largest body; 65536. A larger one is refused here, since a hub closes the connection on a message that
   * is much too large. Raise it with the hub's `max_frame`.
   */
  readonly largest?: number;
  /** Messages that wait to be iterated over; 256. Further ones are dropped and reported. */
  readonly inbox?: number;
  /** The largest share of a wait that is added to it at random; 0.1. */
  readonly jitter?: number;
  /** How long the hub may take to answer before the connection counts as lost; 30000. */
  readonly answerWithinMs?: number;
  /** Called with each message, instead of iteration. */
  readonly onMessage?: (message: Message) => void;
  /** Called with each denial. Without it, `console.warn` gets the wait and the reason. */
  readonly onRateLimited?: (denial: RateLimited) => void;
  /** Called with each connection that was lost or failed, before the next attempt. */
  readonly onDisconnected?: (loss: Disconnected) => void;
  /** Called with each message that came while the inbox was full. */
  readonly onDropped?: (message: Message) => void;
  /** Clock, timers and random numbers, for tests. */
  readonly runtime?: Runtime;
}

/** Validated options, with defaults filled in. */
export interface Settings extends Runtime {
  readonly url: string;
  readonly address: string;
  readonly token: string;
  readonly WebSocket: RelaySocketClass;
  readonly most: number;
  readonly inFlight: number;
  readonly largest: number;
  readonly inbox: number;
  readonly jitter: number;
  readonly answerWithinMs: number;
  readonly onMessage: ((message: Message) => void) | undefined;
  readonly onRateLimited: (denial: RateLimited) => void;
  readonly onDisconnected: ((loss: Disconnected) => void) | undefined;
  readonly onDropped: ((message: Message) => void) | undefined;
}

/** Validates options, or throws a `TypeError` that names the wrong one. */
export function checked(url: string, options: RelayOptions): Settings {
  const runtime = options.runtime ?? systemRuntime;
  return {
    url: address(url),
    address: text("address", options.address, "the agent's id"),
    token: text("token", options.token, "what the agent got when it was registered"),
    WebSocket: options.WebSocket ?? builtInSocketClass(),
    most: number("most", options.most ?? 256, { whole: true, from: 1 }),
    inFlight: number("inFlight", options.inFlight ?? 1, { whole: true, from: 1 }),
    largest: number("largest", options.largest ?? 65_536, { whole: true, from: 1 }),
    inbox: number("inbox", options.inbox ?? 256, { whole: true, from: 1 }),
    jitter: number("jitter", options.jitter ?? 0.1, { whole: false, from: 0 }),
    answerWithinMs: number("answerWithinMs", options.answerWithinMs ?? 30_000, { whole: false, from: 1 }),
    onMessage: options.onMessage,
    onRateLimited: options.onRateLimited ?? warn,
    onDisconnected: options.onDisconnected,
    onDropped: options.onDropped,
    now: () => runtime.now(),
    after: (milliseconds, call) => runtime.after(milliseconds, call),
    random: () => runtime.random(),
  };
}

function warn({ waitMs, reason }: RateLimited): void {
  const shown = reason.slice(0, 200).replace(/\p{C}/gu, "\u{fffd}"); // else it could control the terminal
  console.warn(`@headgate/relay: rate limited, waiting ${waitMs} ms: ${shown}`);
}

function address(url: string): string {
  if (typeof url !== "string" || !/^wss?:\/\/[^/?#\s]+[^#\s]*$/i.test(url) || !isUrl(url)) {
    throw new TypeError(`expected the address of a relay such as "ws://127.0.0.1:8080/relay", got ${shown(url)}`);
  }
  return url;
}

function isUrl(text: string): boolean {
  try {
    return new URL(text).host !== "";
  } catch {
    return false;
  }
}

function text(name: string, value: unknown, what: string): string {
  if (typeof value !== "string" || value === "") {
    throw new TypeError(`expected \`${name}\`, ${what}, got ${value === "" ? "an empty text" : typeof value}`);
  }
  return value;
}

function number(name: string, value: unknown, { whole, from }: { whole: boolean; from: number }): number {
  if (typeof value !== "number" || !(value >= from) || !(value <= 1e9) || (whole && !Number.isInteger(value))) {
    const expected = `a ${whole ? "whole " : ""}number from ${from} on`;
    throw new TypeError(`expected \`${name}\` to be ${expected}, got ${shown(value)}`);
  }
  return value;
}

function shown(value: unknown): string {
  return typeof value === "string" ? JSON.stringify(value.slice(0, 80)) : String(value);
}
