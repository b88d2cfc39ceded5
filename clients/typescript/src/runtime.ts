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
  /** The package `ws` shows what a server answers instead of opening a WebSocket. */
  on?(type: "unexpected-response", listener: (request: unknown, response: HttpResponse) => void): unknown;
}

/** An answer in HTTP, as Node has it. */
export interface HttpResponse {
  readonly statusCode?: number | undefined;
  readonly headers: { readonly "retry-after"?: string | undefined };
  setEncoding(encoding: "utf8"): unknown;
  on(type: "data" | "end" | "error" | "close", listener: (text: string) => void): unknown;
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
  const { process } = globalThis as { process?: { versions?: { undici?: string } } };
  const dispatcher = (globalThis as Record<symbol, unknown>)[Symbol.for("undici.globalDispatcher.1")];
  if (process?.versions?.undici === undefined || dispatcher === undefined || "terminate" in found.prototype) {
    return found;
  }
  return terminable(found, dispatcher as Dispatcher);
}

/** What sends the requests of Node's fetch and WebSocket. The handler gets the TCP socket with the upgrade. */
interface Dispatcher {
  dispatch(options: object, handler: Record<string, (...details: unknown[]) => unknown>): boolean;
}

/**
 * Node's built-in WebSocket with a `terminate`. By itself it waits for the other side's close for ever, and so would the
 * process.
 */
function terminable(
  SocketClass: new (url: string, options?: object) => RelaySocket,
  dispatcher: Dispatcher,
): RelaySocketClass {
  return class {
    constructor(url: string) {
      let tcp: { destroy(): void } | undefined;
      const dispatch: Dispatcher["dispatch"] = (options, handler) => {
        const watching = Object.create(handler) as typeof handler;
        for (const name of ["onUpgrade", "onRequestUpgrade"]) {
          if (handler[name] !== undefined) {
            watching[name] = (...details) => {
              tcp = details.at(-1) as { destroy(): void };
              return handler[name]?.call(watching, ...details);
            };
          }
        }
        return dispatcher.dispatch(options, watching);
      };
      let socket: RelaySocket;
      try {
        socket = new SocketClass(url, { dispatcher: { dispatch } });
      } catch {
        return new SocketClass(url); // somebody has put another class in its place
      }
      // While it connects, there is no upgraded socket yet, and `close` is enough.
      socket.terminate = () => (tcp === undefined ? socket.close() : tcp.destroy());
      return socket;
    }
  } as unknown as RelaySocketClass;
}
