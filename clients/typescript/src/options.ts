import type { Message } from "./client.js";
import { ownSocketClass, real, type RelaySocketClass, type Surroundings } from "./surroundings.js";

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
  /** Who this is: an agent's id. */
  readonly address: string;
  /** The token that the agent got when it was registered. */
  readonly token: string;
  /** The class of WebSockets: that of the package `ws` where the runtime has none of its own. */
  readonly WebSocket?: RelaySocketClass;
  /** Envelopes that are taken before `send` waits for room; 256. */
  readonly most?: number;
  /** Envelopes that are sent before the first of them is answered; 1, which keeps the order even if one is denied. */
  readonly inFlight?: number;
  /**
   * Bytes of the largest body; 65536. What is larger is refused here, since a hub ends the connection over a message
   * that is much larger than it takes. Raise it with the hub's `max_frame`.
   */
  readonly largest?: number;
  /** Messages that wait for whoever iterates; 256. What comes then is dropped and reported. */
  readonly inbox?: number;
  /** The share that chance adds to each wait, at most; 0.1. */
  readonly jitter?: number;
  /** How long the hub may take to answer before the connection counts as lost; 30000. */
  readonly answerWithinMs?: number;
  /** Takes messages as they come, in place of iteration. */
  readonly onMessage?: (message: Message) => void;
  /** Is told of each denial. */
  readonly onRateLimited?: (denial: RateLimited) => void;
  /** Is told of each connection that was lost or could not be made, while another is going to be tried. */
  readonly onDisconnected?: (loss: Disconnected) => void;
  /** Is told of each message that came while the inbox was full. */
  readonly onDropped?: (message: Message) => void;
  /** Time and chance, for tests. */
  readonly surroundings?: Surroundings;
}

/** Options that were looked at, with what was left out filled in. */
export interface Settings extends Surroundings {
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
  readonly onRateLimited: ((denial: RateLimited) => void) | undefined;
  readonly onDisconnected: ((loss: Disconnected) => void) | undefined;
  readonly onDropped: ((message: Message) => void) | undefined;
}

/** Reads options, or throws a `TypeError` that says which of them can't be used. */
export function checked(url: string, options: RelayOptions): Settings {
  const surroundings = options.surroundings ?? real;
  return {
    url: address(url),
    address: text("address", options.address, "the agent's id"),
    token: text("token", options.token, "what the agent got when it was registered"),
    WebSocket: options.WebSocket ?? ownSocketClass(),
    most: number("most", options.most ?? 256, { whole: true, from: 1 }),
    inFlight: number("inFlight", options.inFlight ?? 1, { whole: true, from: 1 }),
    largest: number("largest", options.largest ?? 65_536, { whole: true, from: 1 }),
    inbox: number("inbox", options.inbox ?? 256, { whole: true, from: 1 }),
    jitter: number("jitter", options.jitter ?? 0.1, { whole: false, from: 0 }),
    answerWithinMs: number("answerWithinMs", options.answerWithinMs ?? 30_000, { whole: false, from: 1 }),
    onMessage: options.onMessage,
    onRateLimited: options.onRateLimited,
    onDisconnected: options.onDisconnected,
    onDropped: options.onDropped,
    now: () => surroundings.now(),
    after: (milliseconds, call) => surroundings.after(milliseconds, call),
    random: () => surroundings.random(),
  };
}

function address(url: string): string {
  if (typeof url !== "string" || !/^wss?:\/\/[^/?#\s]+[^#\s]*$/i.test(url)) {
    throw new TypeError(`expected the address of a relay such as "ws://127.0.0.1:8080/relay", got ${shown(url)}`);
  }
  return url;
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
