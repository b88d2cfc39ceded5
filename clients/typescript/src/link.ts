import { create, fromBinary, toBinary } from "@bufbuild/protobuf";

import { type Envelope, EnvelopeSchema, HelloSchema, MessageType } from "./gen/headgate/v1/envelope_pb.js";
import type { RelaySocket, RelaySocketClass } from "./surroundings.js";

/** How a connection has ended. */
export interface Ending {
  /** The WebSocket's close code: 1006 where there was no word of farewell, or no connection at all. */
  readonly code: number;
  readonly reason: string;
}

/** What a link tells. After `ended` it says nothing more. */
export interface Listener {
  /** The hub knows now who this is. */
  welcomed(): void;
  /** The hub has answered HELLO with something else than WELCOME. */
  refused(answer: Envelope): void;
  received(envelope: Envelope): void;
  ended(ending: Ending): void;
}

const HELLO = "hello";
const UNREADABLE = 4002; // the codes from 4000 on are those that an application may choose

/** One connection to a relay, from HELLO to its end. */
export class Link {
  readonly #socket: RelaySocket;
  readonly #listener: Listener;
  #welcomed = false;
  #ended = false;
  #trouble = "";

  constructor(SocketClass: RelaySocketClass, url: string, address: string, token: string, listener: Listener) {
    this.#listener = listener;
    this.#socket = new SocketClass(url);
    this.#socket.binaryType = "arraybuffer";
    this.#socket.addEventListener("open", () => {
      const payload = { case: "hello", value: create(HelloSchema, { address, token }) } as const;
      this.send(written(create(EnvelopeSchema, { id: HELLO, type: MessageType.HELLO, payload })));
    });
    this.#socket.addEventListener("message", (event) => this.#hear(event.data));
    this.#socket.addEventListener("error", (event) => {
      // Only `ws` says what went wrong; browsers keep it to themselves.
      this.#trouble = "message" in event && typeof event.message === "string" ? event.message : "";
    });
    this.#socket.addEventListener("close", (event) => this.#end(event.code, event.reason || this.#trouble));
  }

  get welcomed(): boolean {
    return this.#welcomed && !this.#ended;
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#socket.send(frame);
  }

  /** Takes leave. `ended` is told when the other side has, too. */
  close(): void {
    this.#socket.close(1000);
  }

  /** Ends it here and now, whatever the other side does. */
  abandon(code: number, reason: string): void {
    if (this.#socket.terminate !== undefined) {
      this.#socket.terminate();
    } else {
      this.#socket.close();
    }
    this.#end(code, reason);
  }

  #hear(data: unknown): void {
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
export function written(envelope: Envelope): Uint8Array<ArrayBuffer> {
  return toBinary(EnvelopeSchema, envelope);
}
