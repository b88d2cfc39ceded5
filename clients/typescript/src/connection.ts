import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

import { type Envelope, EnvelopeSchema, HelloSchema, MessageType } from "./gen/headgate/v1/envelope_pb.js";
import type { RelaySocket, RelaySocketClass } from "./runtime.js";

/** How a connection was closed. */
export interface CloseInfo {
  /** The WebSocket's close code: 1006 if there was no close handshake, or no connection at all. */
  readonly code: number;
  readonly reason: string;
}

/** The events of a connection. `ended` is the last. */
export interface ConnectionListener {
  /** The hub has accepted HELLO. */
  welcomed(): void;
  /** The hub has answered HELLO with anything but WELCOME. */
  refused(answer: Envelope): void;
  received(envelope: Envelope): void;
  ended(close: CloseInfo): void;
}

const HELLO = "hello";
const UNREADABLE = 4002; // codes from 4000 on are free for applications

/** One connection to a relay, from HELLO to its end. */
export class Connection {
  readonly #socket: RelaySocket;
  readonly #listener: ConnectionListener;
  #welcomed = false;
  #ended = false;
  #socketError = "";

  constructor(SocketClass: RelaySocketClass, url: string, address: string, token: string, listener: ConnectionListener) {
    this.#listener = listener;
    this.#socket = new SocketClass(url);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.addEventListener("open", () => {
      const payload = { case: "hello", value: create(HelloSchema, { address, token }) } as const;
      this.send(encode(create(EnvelopeSchema, { id: HELLO, type: MessageType.HELLO, payload })));
    });
    this.#socket.addEventListener("message", (event) => this.#receive(event.data));
    this.#socket.addEventListener("error", (event) => {
      // Only `ws` says what went wrong; browsers do not.
      this.#socketError = "message" in event && typeof event.message === "string" ? event.message : "";
    });
    this.#socket.addEventListener("close", (event) => this.#end(event.code, event.reason || this.#socketError));
  }

  get welcomed(): boolean {
    return this.#welcomed && !this.#ended;
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#socket.send(frame);
  }

  /** Starts the close handshake. `ended` follows when the other side has answered. */
  close(): void {
    this.#socket.close(1000);
  }

  /** Ends the connection at once, without waiting for the other side. */
  abandon(code: number, reason: string): void {
    if (this.#socket.terminate !== undefined) {
      this.#socket.terminate();
    } else {
      this.#socket.close();
    }
    this.#end(code, reason);
  }

  #receive(data: unknown): void {
    if (this.#ended) {
      return;
    }
    let envelope: Envelope;
    try {
      if (typeof data === "string") {
        throw new TypeError("text");
      }
      envelope = fromBinary(EnvelopeSchema, new Uint8Array(data as ArrayBuffer));
    } catch {
      this.abandon(UNREADABLE, "expected an Envelope of headgate.v1 in a binary message, got something else");
      return;
    }
    if (this.#welcomed) {
      this.#listener.received(envelope);
    } else if (envelope.type === MessageType.WELCOME) {
      this.#welcomed = true;
      this.#listener.welcomed();
    } else {
      this.#listener.refused(envelope);
    }
  }

  #end(code: number, reason: string): void {
    if (!this.#ended) {
      this.#ended = true;
      this.#listener.ended({ code, reason });
    }
  }
}

/** An envelope as bytes. */
export function encode(envelope: Envelope): Uint8Array<ArrayBuffer> {
  return toBinary(EnvelopeSchema, envelope);
}
