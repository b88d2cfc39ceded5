import { create } from "@bufbuild/protobuf";

import { RelayError } from "./errors.js";
import { DataSchema, type Envelope, EnvelopeSchema, MessageType } from "./gen/headgate/v1/envelope_pb.js";
import { Inbox } from "./inbox.js";
import { backoff, jitter, toldWait } from "./backoff.js";
import { ReconnectingConnection } from "./reconnect.js";
import { type CloseInfo, encode } from "./connection.js";
import { checked, type RelayOptions, type Settings } from "./options.js";
import { Outbox, type PendingEnvelope } from "./outbox.js";
import { Pace } from "./pace.js";

/** A message from another agent. */
export interface Message {
  /** The sender's id for it. The same id may come twice, after a connection was lost. */
  readonly id: string;
  /** The sender, verified by the hub. */
  readonly from: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** The id of the message that it answers; empty if it is no answer. */
  readonly inReplyTo: string;
}

/** The options of `send`. */
export interface SendOptions {
  /** The type of the body; by default "text/plain" for text, "application/octet-stream" for bytes. */
  readonly contentType?: string;
  /** The id of the message that this one answers. */
  readonly inReplyTo?: string;
  /** Aborts the call: a message that has not been sent by then never will be. */
  readonly signal?: AbortSignal;
}

/** The hub has accepted a message. */
export interface Receipt {
  /** The id of the message, which an answer names. */
  readonly id: string;
}

/** A message that the hub has not acknowledged. */
export interface Unsent {
  readonly id: string;
  readonly to: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** Whether it was sent without an answer: it may have arrived. */
  readonly mayHaveArrived: boolean;
}

const TOO_BIG = 1009; // the close code for a message that is too large to read
const USUAL = 65_536 + 1024; // bytes of a body that every hub reads by default, and of its envelope
const LOSSES = 3; // connections that a larger envelope may cost
const TRUSTED_DENIALS = 3; // of one envelope, whose waits are taken for true

/**
 * An agent's connection to a hub's relay, for browsers and Node. It connects at once, and reconnects when it drops.
 *
 * `send` resolves when the hub has passed the envelope on, and rejects with a `RelayError` otherwise. Envelopes are sent
 * in the order of the calls. A denial is reported; nothing is sent until the wait is over, and the denied envelope goes
 * first. Envelopes that were not answered when a connection was lost are sent again on the next one: nothing is lost,
 * and only then can the other agent get the same id twice.
 */
export class RelayClient implements AsyncIterable<Message> {
  /** Resolves when the hub has welcomed this client for the first time; rejects if it will not, or after `close`. */
  readonly ready: Promise<void>;

  readonly #settings: Settings;
  readonly #connection: ReconnectingConnection;
  readonly #pace = new Pace();
  readonly #outbox: Outbox;
  readonly #inbox: Inbox<Message>;
  readonly #name = randomName();
  readonly #notReady: (error: RelayError) => void;
  #number = 0;
  #dropped = 0;
  #unreadable = 0;
  #end: RelayError | undefined; // set: nothing more is taken
  #closing: Promise<Unsent[]> | undefined;
  #emptySince: number | undefined;
  #stopWaiting: (() => void) | undefined;
  #stopAnswerTimer: (() => void) | undefined;
  #drained: (() => void) | undefined; // while close waits for the outbox
  #deadline = Infinity;
  #stopDeadline: (() => void) | undefined;

  /** Connects to a relay such as "wss://hub.example/relay". Invalid options throw a `TypeError`. */
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
    this.ready.catch(() => undefined); // a caller that ignores `ready` gets the error from `send`
    this.#notReady = refuse;
    this.#connection = new ReconnectingConnection(this.#settings, {
      connected: () => {
        up();
        this.#pump();
      },
      received: (envelope) => this.#received(envelope),
      unreadable: (size) => this.#unread(size),
      disconnected: (close) => this.#disconnected(close),
      rateLimited: (denial) => notify(this.#settings.onRateLimited, denial),
      retrying: (loss) => notify(this.#settings.onDisconnected, loss),
      refused: (error) => this.#refused(error),
    });
  }

  /** Envelopes that were taken and not yet answered: at most `most`. */
  get queued(): number {
    return this.#outbox.taken;
  }

  /** Those of them that were sent. */
  get inFlight(): number {
    return this.#outbox.inFlight;
  }

  /** Calls of `send` that wait for room in the queue. */
  get waiting(): number {
    return this.#outbox.waiting;
  }

  /** Messages that came while the inbox was full. */
  get dropped(): number {
    return this.#dropped;
  }

  /** Messages of the hub that can't be read. */
  get unreadable(): number {
    return this.#unreadable;
  }

  /**
   * Sends a message to an agent, and resolves when the hub has passed it on.
   *
   * It waits while the queue is full; do not change the body until then. It rejects with a `RelayError` if the hub does
   * not pass it on, and with the signal's reason if that aborts first: a message that was sent may still arrive.
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
    const size = Math.max(bytes.length, to.length, contentType.length, inReplyTo.length);
    if (size > this.#settings.largest) {
      throw new RelayError("too_large", `expected at most ${this.#settings.largest} bytes, got ${size}`);
    }
    let abort = (): void => undefined;
    const answer = new Promise<Receipt>((resolve, reject) => {
      const pending = this.#pending(to, bytes, contentType, inReplyTo, resolve, reject);
      abort = () => {
        this.#outbox.withdraw(pending);
        reject(signal?.reason);
        this.#settled();
      };
      signal?.addEventListener("abort", abort);
      if (this.#emptySince !== undefined) {
        this.#pace.idle(this.#emptySince, this.#settings.now());
        this.#emptySince = undefined;
      }
      this.#outbox.add(pending);
      this.#pump();
    });
    try {
      return await answer;
    } finally {
      signal?.removeEventListener("abort", abort);
    }
  }

  /**
   * Takes nothing more, waits until everything is answered, for at most `withinMs`, and closes the connection.
   *
   * Returns the messages that were not acknowledged; their calls of `send` reject with the code `closed`. It may be
   * called again, also to wait for less.
   */
  close({ withinMs = 5000 }: { withinMs?: number } = {}): Promise<Unsent[]> {
    this.#end ??= new RelayError("closed", "this client was closed");
    this.#closing ??= this.#shutDown();
    const deadline = this.#settings.now() + Math.max(0, withinMs);
    if (this.#drained !== undefined && !(deadline >= this.#deadline)) {
      this.#stopDeadline?.();
      this.#deadline = deadline;
      if (withinMs > 0) {
        this.#stopDeadline = this.#settings.after(withinMs, this.#drained);
      } else {
        this.#drained();
      }
    }
    return this.#closing;
  }

  /** The messages of other agents, each once. The end comes with `close`, or with the error that ended the client. */
  [Symbol.asyncIterator](): AsyncIterator<Message, undefined> {
    if (this.#settings.onMessage !== undefined) {
      throw new TypeError("expected no onMessage where messages are iterated over: they all go to it");
    }
    return { next: () => this.#inbox.read() };
  }

  async #shutDown(): Promise<Unsent[]> {
    if (!this.#outbox.empty) {
      await new Promise<void>((resolve) => (this.#drained = resolve));
      this.#stopDeadline?.();
      this.#drained = undefined;
    }
    const unsent = this.#outbox.clear();
    this.#finish(unsent, new RelayError("closed", "this client was closed before the hub had answered"));
    await this.#connection.close();
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

  /** Rejects the calls of all envelopes that were not answered. */
  #finish(all: PendingEnvelope[], error: RelayError): void {
    this.#notReady(error);
    for (const pending of all) {
      pending.reject(error);
    }
    this.#drained?.();
  }

  #pending(
    to: string,
    body: Uint8Array,
    contentType: string,
    inReplyTo: string,
    resolve: (receipt: Receipt) => void,
    reject: (error: unknown) => void,
  ): PendingEnvelope {
    const number = ++this.#number;
    const id = `${this.#name}-${number}`;
    const encodeData = (): Uint8Array<ArrayBuffer> => {
      const payload = { case: "data", value: create(DataSchema, { body, contentType }) } as const;
      return encode(create(EnvelopeSchema, { id, type: MessageType.DATA, to, inReplyTo, payload }));
    };
    const answered = (): void => resolve({ id });
    const state = { losses: 0, denials: 0, withdrawn: false };
    return { number, id, to, body, contentType, encode: encodeData, ...state, resolve: answered, reject };
  }

  /** Sends what may be sent now, and sets a timer for the rest. */
  #pump(): void {
    const { now, after, inFlight } = this.#settings;
    while (this.#connection.isConnected && this.#outbox.ready && this.#outbox.inFlight < (this.#pace.free ? inFlight : 1)) {
      const wait = this.#pace.wait(now());
      if (wait > 0) {
        this.#stopWaiting?.();
        this.#stopWaiting = after(wait, () => this.#pump()); // checks the clock again: timers may be early
        return;
      }
      this.#connection.send(this.#outbox.take(now()));
      this.#startAnswerTimer();
    }
  }

  /** The hub must answer the oldest envelope in flight in time. */
  #startAnswerTimer(): void {
    const { now, after, answerWithinMs } = this.#settings;
    const oldest = this.#outbox.oldest();
    this.#stopAnswerTimer?.();
    this.#stopAnswerTimer = undefined;
    if (oldest !== undefined) {
      const left = (oldest.sent ?? now()) + answerWithinMs - now();
      this.#stopAnswerTimer = after(left, () => this.#connection.abandon(`no answer within ${answerWithinMs} ms`));
    }
  }

  #received(envelope: Envelope): void {
    const { case: kind, value } = envelope.payload;
    if (kind === "data") {
      const { id, from, inReplyTo } = envelope;
      this.#connection.worked();
      this.#deliver({ id, from, inReplyTo, body: value.body, contentType: value.contentType });
      return;
    }
    const pending = this.#outbox.find(envelope.inReplyTo);
    if (pending === undefined) {
      return; // it answers nothing that is in flight
    }
    if (kind === "rateLimited") {
      this.#denied(pending, Number(value.retryAfterMs), value.reason);
    } else if (kind === "error" || (kind === "ack" && envelope.inReplyTo !== "")) {
      this.#connection.worked();
      this.#pace.passed(pending.sent ?? this.#settings.now());
      this.#outbox.answered(pending);
      if (kind === "ack") {
        pending.resolve();
      } else {
        pending.reject(new RelayError(value.code, value.detail));
      }
    }
    this.#startAnswerTimer();
    this.#settled();
  }

  #denied(pending: PendingEnvelope, toldMs: number, reason: string): void {
    const { now, random } = this.#settings;
    pending.denials += 1;
    const surplus = pending.denials - TRUSTED_DENIALS;
    const waitMs = Math.max(toldWait(toldMs), surplus > 0 ? backoff(surplus, random) : 0);
    this.#pace.denied(now(), waitMs, jitter(waitMs, this.#settings));
    notify(this.#settings.onRateLimited, { waitMs, reason, id: pending.id });
    this.#outbox.requeue(pending);
  }

  #deliver(message: Message): void {
    if (this.#settings.onMessage !== undefined) {
      notify(this.#settings.onMessage, message);
    } else if (!this.#inbox.push(message)) {
      this.#dropped += 1;
      notify(this.#settings.onDropped, message);
    }
  }

  #unread(size: number): void {
    this.#unreadable += 1;
    if (Number.isInteger(Math.log2(this.#unreadable))) {
      const found = `dropped a message of the hub that can't be read, of ${size} bytes or characters`;
      console.error(`@headgate/relay: ${found} (${this.#unreadable} so far)`);
    }
  }

  #disconnected({ code, reason }: CloseInfo): void {
    const largest = this.#outbox.largest();
    const size = largest?.frame?.length ?? 0; // not that of its body: a hub counts the texts of an envelope, too
    // The close code is often lost: the connection breaks while so much is still being sent.
    const often = largest !== undefined && size > USUAL && largest.losses + 1 >= LOSSES;
    if (largest !== undefined && (code === TOO_BIG || often)) {
      this.#outbox.answered(largest); // else it would end every later connection
      const detail = reason || `the connection was lost ${LOSSES} times over ${size} bytes`;
      largest.reject(new RelayError("too_large", detail));
    }
    this.#outbox.lost();
    this.#pace.interrupted();
    this.#stopWaiting?.();
    this.#startAnswerTimer();
    this.#settled();
  }

  /** An envelope was answered or withdrawn: send others, or finish. */
  #settled(): void {
    if (this.#outbox.empty) {
      this.#emptySince ??= this.#settings.now();
      this.#drained?.();
    } else {
      this.#pump();
    }
  }
}

/** Calls one of the user's functions later. Its errors are logged, and do not affect the client. */
function notify<T>(listener: ((what: T) => unknown) | undefined, what: T): void {
  if (listener !== undefined) {
    void Promise.resolve(what)
      .then(listener)
      .catch((error: unknown) => console.error("@headgate/relay: a listener has failed:", error));
  }
}

/** The prefix of a client's ids, which no other client has. */
function randomName(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
