import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

import { type Envelope, EnvelopeSchema, HelloSchema, MessageType } from "./gen/headgate/v1/envelope_pb.js";
import type { HttpResponse, RelaySocket, RelaySocketClass } from "./runtime.js";

/** How a connection was closed. */
export interface CloseInfo {
  /** The WebSocket's close code: 1006 if there was no close handshake, or no connection at all. */
  readonly code: number;
  readonly reason: string;
  /** What the server answered instead of opening a WebSocket, where the runtime shows it. */
  readonly http?: HttpAnswer | undefined;
}

/** An answer in HTTP. */
export interface HttpAnswer {
  readonly status: number;
  readonly retryAfter: string;
  /** Its first characters. */
  body: string;
}

/** The events of a connection. `ended` is the last. */
export interface ConnectionListener {
  /** The hub has accepted HELLO. */
  welcomed(): void;
  /** The hub has answered HELLO with anything but WELCOME. */
  refused(answer: Envelope): void;
  received(envelope: Envelope): void;
  /** A message came that can't be read, of so many bytes or characters. */
  unreadable(size: number): void;
  ended(close: CloseInfo): void;
}

const HELLO = "hello";
const ABNORMAL = 1006; // the close code where there was no close handshake
const FAILED = 4001; // codes from 4000 on are free for applications
const UNREADABLE = 4002;
const LARGEST_BODY = 4096;

/** One connection to a relay, from HELLO to its end. Whatever fails on the way ends it, and nothing else. */
export class Connection {
  readonly #socket: RelaySocket;
  readonly #listener: ConnectionListener;
  #state: "greeting" | "welcomed" | "refused" | "ended" = "greeting";
  #socketError = "";
  #http: HttpAnswer | undefined;

  /** Throws what the class of WebSockets throws. */
  constructor(SocketClass: RelaySocketClass, url: string, address: string, token: string, listener: ConnectionListener) {
    this.#listener = listener;
    this.#socket = new SocketClass(url);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.addEventListener("open", () => {
      const payload = { case: "hello", value: create(HelloSchema, { address, token }) } as const;
      this.send(encode(create(EnvelopeSchema, { id: HELLO, type: MessageType.HELLO, payload })));
    });
    this.#socket.addEventListener("message", ({ data }) => this.#guard(() => this.#receive(data)));
    this.#socket.addEventListener("error", (event) => this.#failed(event));
    this.#socket.addEventListener("close", ({ code, reason }) => this.#end(code, reason || this.#socketError));
    this.#socket.on?.("unexpected-response", (_, response) => this.#guard(() => this.#answered(response)));
  }

  get welcomed(): boolean {
    return this.#state === "welcomed";
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#guard(() => this.#socket.send(frame));
  }

  /** Starts the close handshake. `ended` follows when the other side has answered. */
  close(): void {
    this.#guard(() => this.#socket.close(1000));
  }

  /** Ends the connection at once, without waiting for the other side. */
  abandon(code: number, reason: string): void {
    if (this.#state === "ended") {
      return; // to end a WebSocket again may fail it again, and so on for ever
    }
    try {
      if (this.#socket.terminate !== undefined) {
        this.#socket.terminate();
      } else {
        this.#socket.close();
      }
    } catch {
      // It is left to itself: nothing of it is heard any more.
    }
    this.#end(code, reason);
  }

  #guard(call: () => void): void {
    try {
      call();
    } catch (error) {
      this.abandon(FAILED, String(error));
    }
  }

  #receive(data: unknown): void {
    if (this.#state === "ended") {
      return;
    }
    const envelope = decode(data);
    if (envelope === undefined) {
      this.#listener.unreadable(size(data));
      if (this.#state === "greeting") {
        this.abandon(UNREADABLE, "expected WELCOME, got what is no Envelope of headgate.v1");
      }
    } else if (this.#state === "welcomed" || envelope.payload.case === "data") {
      this.#listener.received(envelope); // a message may come before WELCOME
    } else if (this.#state === "greeting" && envelope.payload.case === "welcome") {
      this.#state = "welcomed";
      this.#listener.welcomed();
    } else if (this.#state === "greeting") {
      this.#state = "refused";
      this.#listener.refused(envelope);
    }
  }

  #failed(event: object): void {
    // Only `ws` and Node say what went wrong; browsers do not.
    this.#socketError = "message" in event && typeof event.message === "string" ? event.message : "";
    // "close" follows at once, or late: `ws` waits for the other side, and in Node 20 and 22 it never comes.
    queueMicrotask(() => this.abandon(ABNORMAL, this.#socketError));
  }

  #answered(response: HttpResponse): void {
    const { statusCode: status = 0, headers } = response;
    const http = { status, retryAfter: headers["retry-after"] ?? "", body: "" };
    this.#http = http;
    const finish = (): void => this.abandon(ABNORMAL, `HTTP status ${status}`);
    response.setEncoding("utf8");
    response.on("data", (text) => {
      http.body = (http.body + text).slice(0, LARGEST_BODY);
      if (http.body.length === LARGEST_BODY) {
        finish();
      }
    });
    response.on("end", finish);
    response.on("error", finish);
    response.on("close", finish);
  }

  #end(code: number, reason: string): void {
    if (this.#state !== "ended") {
      this.#state = "ended";
      this.#listener.ended({ code, reason, http: this.#http });
    }
  }
}

/** An envelope as bytes. */
export function encode(envelope: Envelope): Uint8Array<ArrayBuffer> {
  return toBinary(EnvelopeSchema, envelope);
}

/** The envelope in a message; undefined if there is none. */
function decode(data: unknown): Envelope | undefined {
  try {
    return isBinary(data) ? fromBinary(EnvelopeSchema, new Uint8Array(data)) : undefined;
  } catch {
    return undefined;
  }
}

function isBinary(data: unknown): data is ArrayBuffer {
  return Object.prototype.toString.call(data) === "[object ArrayBuffer]"; // also that of another realm
}

function size(data: unknown): number {
  return typeof data === "string" ? data.length : isBinary(data) ? data.byteLength : 0;
}
