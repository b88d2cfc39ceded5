/** A WebSocket, as the client needs it: that of a browser, of Node from 22 on, or of the package `ws`. */
export interface RelaySocket {
  binaryType: string;
  send(data: Uint8Array<ArrayBuffer>): void;
  close(code?: number, reason?: string): void;
  /** Ends it without a close handshake, where that is possible. */
  terminate?(): void;
  addEventListener(type: "open", listener: () => void): void;
  addEventListener(type: "message", listener: (event: { data: unknown }) => void): void;
  addEventListener(type: "error", listener: (event: object) => void): void;
  addEventListener(type: "close", listener: (event: { code: number; reason: string }) => void): void;
}

/** The class of WebSockets. */
export type RelaySocketClass = new (url: string) => RelaySocket;

/** Clock, timers and random numbers: those of the system, unless a test brings its own. */
export interface Runtime {
  /** Milliseconds of a clock that only goes forward. */
  now(): number;
  /** Calls a function once after so many milliseconds. Returns a function that cancels it. */
  after(milliseconds: number, call: () => void): () => void;
  /** From 0 up to, but not including, 1. */
  random(): number;
}

const LONGEST_TIMER = 2 ** 31 - 1; // a longer one would fire at once

export const systemRuntime: Runtime = {
  now: () => performance.now(),
  after(milliseconds, call) {
    const timer = setTimeout(call, Math.min(milliseconds, LONGEST_TIMER));
    return () => clearTimeout(timer);
  },
  random: () => Math.random(),
};

/** The built-in WebSocket. */
export function builtInSocketClass(): RelaySocketClass {
  const found: RelaySocketClass | undefined = globalThis.WebSocket;
  if (found === undefined) {
    throw new TypeError(
      "expected a WebSocket class, since this runtime has none built in (Node has one from version 22 on): " +
        'npm install ws, then `import WebSocket from "ws"` and pass { WebSocket } among the options',
    );
  }
  return found;
}
