/** What a client needs of a WebSocket: browsers have such, Node has from 22 on, and so has the package `ws`. */
export interface RelaySocket {
  binaryType: string;
  send(data: Uint8Array<ArrayBuffer>): void;
  close(code?: number, reason?: string): void;
  /** Ends it without a word, where that can be done. */
  terminate?(): void;
  addEventListener(type: "open", listener: () => void): void;
  addEventListener(type: "message", listener: (event: { data: unknown }) => void): void;
  addEventListener(type: "error", listener: (event: object) => void): void;
  addEventListener(type: "close", listener: (event: { code: number; reason: string }) => void): void;
}

/** How a WebSocket is made. */
export type RelaySocketClass = new (url: string) => RelaySocket;

/** Time and chance: the real ones, unless a test brings its own. */
export interface Surroundings {
  /** Milliseconds of a clock that only goes forward. */
  now(): number;
  /** Calls a function once after so many milliseconds, and returns what takes that back. */
  after(milliseconds: number, call: () => void): () => void;
  /** From 0 up to, and without, 1. */
  random(): number;
}

const LONGEST_TIMER = 2 ** 31 - 1; // a longer one would fire at once

export const real: Surroundings = {
  now: () => performance.now(),
  after(milliseconds, call) {
    const timer = setTimeout(call, Math.min(milliseconds, LONGEST_TIMER));
    return () => clearTimeout(timer);
  },
  random: () => Math.random(),
};

/** The runtime's own WebSocket. */
export function ownSocketClass(): RelaySocketClass {
  const found: RelaySocketClass | undefined = globalThis.WebSocket;
  if (found === undefined) {
    throw new TypeError(
      "expected a WebSocket class, since this runtime has none of its own (Node has one from version 22 on): " +
        'npm install ws, then `import WebSocket from "ws"` and pass { WebSocket } among the options',
    );
  }
  return found;
}
