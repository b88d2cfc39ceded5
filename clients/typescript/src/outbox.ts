/** An envelope that the hub has not answered yet. */
export interface PendingEnvelope {
  /** Its position in the order of all. */
  readonly number: number;
  readonly id: string;
  readonly to: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** Encodes it, when there is room for it. */
  encode(): Uint8Array<ArrayBuffer>;
  frame?: Uint8Array<ArrayBuffer>;
  /** When it was last sent. */
  sent?: number;
  /** How often it was sent over a connection that ended before it was answered. */
  losses: number;
  /** How often it was denied. */
  denials: number;
  /** Whether its call was aborted: then it is not sent again. */
  withdrawn: boolean;
  resolve(): void;
  reject(error: unknown): void;
}

/**
 * Envelopes in the order in which they were given: those in flight, those in the queue, and those that wait for room in
 * it. The first two together are never more than `most`.
 */
export class Outbox {
  readonly #most: number;
  readonly #inFlight = new Map<string, PendingEnvelope>();
  readonly #queue: PendingEnvelope[] = [];
  readonly #waiting: PendingEnvelope[] = [];

  constructor(most: number) {
    this.#most = most;
  }

  /** Envelopes that were sent and not yet answered. */
  get inFlight(): number {
    return this.#inFlight.size;
  }

  /** Envelopes that were taken and not yet answered, including those in flight. */
  get taken(): number {
    return this.#inFlight.size + this.#queue.length;
  }

  /** Envelopes that wait for room. */
  get waiting(): number {
    return this.#waiting.length;
  }

  get empty(): boolean {
    return this.taken === 0; // while any wait for room, there is no room
  }

  /** Whether there is one to send. */
  get ready(): boolean {
    return this.#queue.length > 0;
  }

  add(pending: PendingEnvelope): void {
    this.#waiting.push(pending);
    this.#fill();
  }

  /** The frame of the next envelope, which is in flight from now on. */
  take(now: number): Uint8Array<ArrayBuffer> {
    const pending = this.#queue.shift();
    if (pending?.frame === undefined) {
      throw new RangeError("nothing is ready");
    }
    pending.sent = now;
    this.#inFlight.set(pending.id, pending);
    return pending.frame;
  }

  /** The envelope in flight with this id. Without an id, the oldest, since the hub answers in order. */
  find(id: string): PendingEnvelope | undefined {
    return id === "" ? this.oldest() : this.#inFlight.get(id);
  }

  /** The one in flight that was sent first. */
  oldest(): PendingEnvelope | undefined {
    return this.#inFlight.values().next().value;
  }

  /** The largest in flight. */
  largest(): PendingEnvelope | undefined {
    const size = (pending: PendingEnvelope): number => pending.frame?.length ?? 0;
    return [...this.#inFlight.values()].sort((one, other) => size(other) - size(one))[0];
  }

  /** An envelope in flight was answered. */
  answered(pending: PendingEnvelope): void {
    this.#inFlight.delete(pending.id);
    this.#fill();
  }

  /** Queues an envelope in flight again, at its position. */
  requeue(pending: PendingEnvelope): void {
    this.#inFlight.delete(pending.id);
    if (!pending.withdrawn) {
      const later = this.#queue.findIndex((other) => other.number > pending.number);
      this.#queue.splice(later < 0 ? this.#queue.length : later, 0, pending);
    }
    this.#fill();
  }

  /** The connection is lost: queues everything in flight again. */
  lost(): void {
    for (const pending of [...this.#inFlight.values()].reverse()) {
      pending.losses += 1;
      this.requeue(pending);
    }
  }

  /** The call of an envelope was aborted. */
  withdraw(pending: PendingEnvelope): void {
    pending.withdrawn = true;
    for (const queue of [this.#queue, this.#waiting]) {
      const position = queue.indexOf(pending);
      if (position >= 0) {
        queue.splice(position, 1);
      }
    }
    this.#fill();
  }

  /** Takes out everything, in order. */
  clear(): PendingEnvelope[] {
    this.lost();
    return [...this.#queue.splice(0), ...this.#waiting.splice(0)];
  }

  #fill(): void {
    while (this.#waiting.length > 0 && this.taken < this.#most) {
      const pending = this.#waiting.shift() as PendingEnvelope;
      pending.frame = pending.encode();
      this.#queue.push(pending);
    }
  }
}
