import { create } from "@bufbuild/protobuf";

import { RelayError } from "./errors.js";
import { DataSchema, type Envelope, EnvelopeSchema, MessageType } from "./gen/headgate/v1/envelope_pb.js";
import { Inbox } from "./inbox.js";
import { Line } from "./line.js";
import { type Ending, written } from "./link.js";
import { checked, type RelayOptions, type Settings } from "./options.js";
import { Outbox, type Parcel } from "./outbox.js";
import { Pace } from "./pace.js";

/** What another agent has sent. */
export interface Message {
  /** The sender's name for it. The same one may come twice, after a connection was lost. */
  readonly id: string;
  /** Whose it is, as the hub has proved. */
  readonly from: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** The id that it answers; empty if it is no answer. */
  readonly inReplyTo: string;
}

/** What `send` may be told besides. */
export interface SendOptions {
  /** What the body is; of text "text/plain", of bytes "application/octet-stream", unless it is said. */
  readonly contentType?: string;
  /** The id of the message that this one answers. */
  readonly inReplyTo?: string;
  /** Gives up: what has not been sent by then never will be. */
  readonly signal?: AbortSignal;
}

/** The hub has it, and it is on its way. */
export interface Receipt {
  /** Its id, which an answer to it names. */
  readonly id: string;
}

/** What was given to `send`, and is not known to be on its way. */
export interface Unsent {
  readonly id: string;
  readonly to: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** Whether it was sent, without an answer: it may have arrived. */
  readonly mayHaveArrived: boolean;
}

const TOO_BIG = 1009; // the close code for a message that is larger than the other side reads at all
const USUAL = 65_536; // bytes that every hub takes, unless it is told to take less
const LOSSES = 3; // connections that one envelope may cost, if it is larger

/**
 * An agent's connection to a hub's relay, for browsers and Node: it connects at once, and again whenever it has to.
 *
 * `send` resolves when the hub has passed the envelope on, and rejects with a `RelayError` if it has not. Envelopes are
 * sent in the order of the calls. One that the hub denies is reported, everything is held back until the wait is over,
 * and it is sent again, first. What was not answered when a connection was lost is sent again on the next one: nothing
 * is lost, and only then can the other agent get the same id twice.
 */
export class RelayClient implements AsyncIterable<Message> {
  /** Resolves when the hub has welcomed this client for the first time; rejects if it will not, or after `close`. */
  readonly ready: Promise<void>;

  readonly #settings: Settings;
  readonly #line: Line;
  readonly #pace = new Pace();
  readonly #outbox: Outbox;
  readonly #inbox: Inbox<Message>;
  readonly #name = randomName();
  readonly #notReady: (error: RelayError) => void;
  #number = 0;
  #dropped = 0;
  #end: RelayError | undefined; // why nothing more is taken
  #closing: Promise<Unsent[]> | undefined;
  #emptySince: number | undefined;
  #stopHolding: (() => void) | undefined;
  #stopListening: (() => void) | undefined;
  #drained: (() => void) | undefined;

  /** Connects to a relay such as "wss://hub.example/relay". Options that can't be used throw a `TypeError`. */
  constructor(url: string, options: RelayOptions) {
    this.#settings = checked(url, options);
    this.#outbox = new Outbox(this.#settings.most);
    this.#inbox = new Inbox(this.#settings.inbox);
    let up = (): void => undefined;
    let refuse = (_: RelayError): void => undefined;
    this.ready = new Promise((resolve, reject) => {
      up = resolve;
      refuse = reject;
    });
    this.ready.catch(() => undefined); // whoever doesn't ask hears of it from `send`
    this.#notReady = refuse;
    this.#line = new Line(this.#settings, {
      up: () => {
        up();
        this.#pump();
      },
      received: (envelope) => this.#received(envelope),
      down: (ending) => this.#down(ending),
      limited: (denial) => tell(this.#settings.onRateLimited, denial),
      trying: (loss) => tell(this.#settings.onDisconnected, loss),
      refused: (error) => this.#refused(error),
    });
  }

  /** How many envelopes were taken and not yet answered: at most `most`. */
  get queued(): number {
    return this.#outbox.taken;
  }

  /** How many of them were sent, and are not yet answered. */
  get inFlight(): number {
    return this.#outbox.inFlight;
  }

  /** How many calls of `send` wait for room in the queue. */
  get waiting(): number {
    return this.#outbox.waiting;
  }

  /** How many messages came while the inbox was full. */
  get dropped(): number {
    return this.#dropped;
  }

  /**
   * Sends something to an agent, and resolves when the hub has it and passes it on.
   *
   * It waits while the queue is full; leave the body as it is until then. It rejects with a `RelayError` if the hub
   * does not pass it on, and with the signal's reason if that gives up first: what was sent by then may still arrive.
   */
  async send(to: string, body: string | Uint8Array, options: SendOptions = {}): Promise<Receipt> {
    if (typeof to !== "string" || to === "") {
      throw new TypeError("expected `to`, the address of another agent");
    }
    if (typeof body !== "string" && !(body instanceof Uint8Array)) {
      throw new TypeError(`expected a body of text or bytes, a string or a Uint8Array, got ${typeof body}`);
    }
    const { signal, contentType = typeof body === "string" ? "text/plain" : "application/octet-stream" } = options;
    const { inReplyTo = "" } = options;
    if (typeof contentType !== "string" || typeof inReplyTo !== "string") {
      throw new TypeError("expected `contentType` and `inReplyTo` to be text");
    }
    signal?.throwIfAborted();
    if (this.#end !== undefined) {
      throw this.#end;
    }
    const bytes = typeof body === "string" ? new TextEncoder().encode(body) : body;
    if (bytes.length > this.#settings.largest) {
      throw new RelayError("too_large", `expected at most ${this.#settings.largest} bytes, got ${bytes.length}`);
    }
    let giveUp = (): void => undefined;
    const answer = new Promise<Receipt>((resolve, reject) => {
      const parcel = this.#parcel(to, bytes, contentType, inReplyTo, resolve, reject);
      giveUp = () => {
        this.#outbox.giveUp(parcel);
        reject(signal?.reason);
        this.#settled();
      };
      signal?.addEventListener("abort", giveUp);
      if (this.#emptySince !== undefined) {
        this.#pace.idle(this.#emptySince, this.#settings.now());
        this.#emptySince = undefined;
      }
      this.#outbox.add(parcel);
      this.#pump();
    });
    try {
      return await answer;
    } finally {
      signal?.removeEventListener("abort", giveUp);
    }
  }

  /**
   * Takes nothing more, waits until everything is answered, but so long at most, and takes leave of the hub.
   *
   * Returns what is not known to be on its way; those calls of `send` reject with the code `closed`.
   */
  close({ withinMs = 5000 }: { withinMs?: number } = {}): Promise<Unsent[]> {
    this.#closing ??= this.#leave(withinMs);
    return this.#closing;
  }

  /** The messages of others, each once; to the end when the client is closed, or with the error that ended it. */
  [Symbol.asyncIterator](): AsyncIterator<Message, undefined> {
    if (this.#settings.onMessage !== undefined) {
      throw new TypeError("expected no onMessage where messages are iterated over: they all go to it");
    }
    return { next: () => this.#inbox.read() };
  }

  async #leave(withinMs: number): Promise<Unsent[]> {
    const refused = this.#end !== undefined;
    this.#end ??= new RelayError("closed", "this client was closed");
    if (!this.#outbox.empty && withinMs > 0) {
      await new Promise<void>((resolve) => {
        const stop = this.#settings.after(withinMs, resolve);
        this.#drained = () => {
          stop();
          resolve();
        };
      });
    }
    const unsent = this.#outbox.clear();
    this.#finish(unsent, new RelayError("closed", "this client was closed before the hub had answered"));
    if (!refused) {
      await this.#line.close();
    }
    this.#inbox.end(undefined);
    return unsent.map(({ id, to, body, contentType, losses }) => {
      return { id, to, body, contentType, mayHaveArrived: losses > 0 };
    });
  }

  #refused(error: RelayError): void {
    this.#end = error;
    this.#finish(this.#outbox.clear(), error);
    this.#inbox.end(error);
  }

  /** Nothing more is sent, and these never were. */
  #finish(parcels: Parcel[], error: RelayError): void {
    this.#notReady(error);
    for (const parcel of parcels) {
      parcel.reject(error);
    }
    this.#drained?.();
  }

  #parcel(
    to: string,
    body: Uint8Array,
    contentType: string,
    inReplyTo: string,
    resolve: (receipt: Receipt) => void,
    reject: (error: unknown) => void,
  ): Parcel {
    const number = ++this.#number;
    const id = `${this.#name}-${number}`;
    const write = (): Uint8Array<ArrayBuffer> => {
      const payload = { case: "data", value: create(DataSchema, { body, contentType }) } as const;
      return written(create(EnvelopeSchema, { id, type: MessageType.DATA, to, inReplyTo, payload }));
    };
    const answered = (): void => resolve({ id });
    return { number, id, to, body, contentType, write, losses: 0, givenUp: false, resolve: answered, reject };
  }

  /** Sends what may be sent now, and comes back when more may be. */
  #pump(): void {
    const { now, after, inFlight } = this.#settings;
    while (this.#line.isUp && this.#outbox.ready && this.#outbox.inFlight < (this.#pace.free ? inFlight : 1)) {
      const wait = this.#pace.wait(now());
      if (wait > 0) {
        this.#stopHolding?.();
        this.#stopHolding = after(wait, () => this.#pump()); // which looks at the clock again: timers may be early
        return;
      }
      this.#line.send(this.#outbox.take(now()));
      this.#listen();
    }
  }

  /** While anything is in flight, the hub must answer within a time. */
  #listen(): void {
    const { after, answerWithinMs } = this.#settings;
    this.#stopListening?.();
    this.#stopListening = undefined;
    if (this.#outbox.inFlight > 0) {
      this.#stopListening = after(answerWithinMs, () => this.#line.abandon(`no answer within ${answerWithinMs} ms`));
    }
  }

  #received(envelope: Envelope): void {
    const { case: kind, value } = envelope.payload;
    if (kind === "data") {
      const { id, from, inReplyTo } = envelope;
      this.#deliver({ id, from, inReplyTo, body: value.body, contentType: value.contentType });
      return;
    }
    const { now, random, jitter } = this.#settings;
    const parcel = this.#outbox.inFlightAs(envelope.inReplyTo);
    if (kind === "rateLimited") {
      const waitMs = Math.max(1, Number(value.retryAfterMs));
      this.#pace.denied(now(), waitMs, waitMs * jitter * random());
      tell(this.#settings.onRateLimited, { waitMs, reason: value.reason, id: parcel?.id ?? "" });
      if (parcel !== undefined) {
        this.#outbox.again(parcel);
      }
    } else if (parcel !== undefined && (kind === "ack" || kind === "error")) {
      this.#pace.passed(parcel.sent ?? now());
      this.#outbox.done(parcel);
      if (kind === "ack") {
        parcel.resolve();
      } else {
        parcel.reject(new RelayError(value.code, value.detail));
      }
    }
    this.#listen();
    this.#settled();
  }

  #deliver(message: Message): void {
    if (this.#settings.onMessage !== undefined) {
      tell(this.#settings.onMessage, message);
    } else if (!this.#inbox.push(message)) {
      this.#dropped += 1;
      tell(this.#settings.onDropped, message);
    }
  }

  #down({ code, reason }: Ending): void {
    const largest = this.#outbox.largest();
    // The close code is often lost: a connection breaks at once, when so much is still on its way.
    const often = largest !== undefined && largest.body.length > USUAL && largest.losses + 1 >= LOSSES;
    if (largest !== undefined && (code === TOO_BIG || often)) {
      this.#outbox.done(largest); // else it would end every connection to come
      const detail = reason || `the connection was lost ${LOSSES} times over ${largest.body.length} bytes`;
      largest.reject(new RelayError("too_large", detail));
    }
    this.#outbox.recall();
    this.#pace.interrupted();
    this.#stopHolding?.();
    this.#listen();
    this.#settled();
  }

  /** Something was answered or given up: others may go, or all is done. */
  #settled(): void {
    if (this.#outbox.empty) {
      this.#emptySince ??= this.#settings.now();
      this.#drained?.();
    } else {
      this.#pump();
    }
  }
}

/** Calls one of the user's functions, so that what it throws is its own affair. */
function tell<T>(listener: ((what: T) => void) | undefined, what: T): void {
  if (listener !== undefined) {
    queueMicrotask(() => listener(what));
  }
}

/** What the ids of one client begin with, and no other's do. */
function randomName(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
