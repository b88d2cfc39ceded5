/** A small server that does what no hub can be made to do at a moment of a test's choice. */
import { once } from "node:events";
import type { AddressInfo } from "node:net";

import { create, fromBinary, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { type WebSocket, WebSocketServer } from "ws";

import { type Envelope, EnvelopeSchema, MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";

type Answer = MessageInitShape<typeof EnvelopeSchema>;

export const welcome: Answer = { type: MessageType.WELCOME, payload: { case: "welcome", value: {} } };
export const ack: Answer = { type: MessageType.ACK, payload: { case: "ack", value: {} } };

export const unauthorized: Answer = {
  type: MessageType.ERROR,
  payload: { case: "error", value: { code: "unauthorized", detail: "the token doesn't belong to the address" } },
};

/** One connection of it. */
export class Caller {
  constructor(
    readonly socket: WebSocket,
    /** Which connection it is, from 1 on. */
    readonly number: number,
  ) {}

  answer(envelope: Envelope, answer: Answer): void {
    this.socket.send(toBinary(EnvelopeSchema, create(EnvelopeSchema, { ...answer, inReplyTo: envelope.id })));
  }
}

export class SmallServer {
  /** What it was sent. */
  readonly heard: Envelope[] = [];
  connections = 0;
  readonly #server: WebSocketServer;

  private constructor(handle: (caller: Caller, envelope: Envelope) => void) {
    this.#server = new WebSocketServer({ host: "127.0.0.1", port: 0 });
    this.#server.on("connection", (socket) => {
      this.connections += 1;
      const caller = new Caller(socket, this.connections);
      socket.on("message", (data) => {
        const envelope = fromBinary(EnvelopeSchema, new Uint8Array(data as Buffer));
        this.heard.push(envelope);
        handle(caller, envelope);
      });
    });
  }

  static async open(handle: (caller: Caller, envelope: Envelope) => void): Promise<SmallServer> {
    const server = new SmallServer(handle);
    await once(server.#server, "listening");
    opened.push(server);
    return server;
  }

  get url(): string {
    return `ws://127.0.0.1:${(this.#server.address() as AddressInfo).port}/relay`;
  }

  /** The ids of what it was sent, without HELLOs. */
  get ids(): string[] {
    return this.heard.filter(({ type }) => type === MessageType.DATA).map(({ id }) => id);
  }

  /** Sends an envelope over each connection, unasked. */
  say(answer: Answer): void {
    for (const socket of this.#server.clients) {
      socket.send(toBinary(EnvelopeSchema, create(EnvelopeSchema, answer)));
    }
  }

  async close(): Promise<void> {
    for (const socket of this.#server.clients) {
      socket.terminate();
    }
    await new Promise((resolve) => this.#server.close(resolve));
  }
}

const opened: SmallServer[] = [];

/** Closes the servers of a test: for `afterEach`. */
export async function closeServers(): Promise<void> {
  await Promise.all(opened.splice(0).map((server) => server.close()));
}
