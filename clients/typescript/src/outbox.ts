/** One envelope on its way, until the hub has answered it. */
export interface Parcel {
  /** Its place in the order of all. */
  readonly number: number;
  readonly id: string;
  readonly to: string;
  readonly body: Uint8Array;
  readonly contentType: string;
  /** Written when there is room for it. */
  write(): Uint8Array<ArrayBuffer>;
  frame?: Uint8Array<ArrayBuffer>;
  /** When it was sent last. */
  sent?: number;
  /** How often it was sent over a connection that ended before it was answered. */
  losses: number;
  /** Whether nobody waits for it any more: then it is not sent again. */
  givenUp: boolean;
  resolve(): void;
  reject(error: unknown): void;
}

/**
 * Envelopes in the order in which they were given: those in flight, those in the queue, and those that wait for room in
 * it. The first two together are never more than `most`.
 */
export class Outbox {
  readonly #most: number;
  readonly #flying = new Map<string, Parcel>();
  readonly #queue: Parcel[] = [];
  readonly #waiting: Parcel[] = [];

  constructor(most: number) {
    this.#most = most;
  }

  /** How many were sent and not yet answered. */
  get inFlight(): number {
    return this.#flying.size;
  }

  /** How many were taken and not yet answered, those in flight among them. */
  get taken(): number {
    return this.#flying.size + this.#queue.length;
  }

  /** How many wait for room. */
  get waiting(): number {
    return this.#waiting.length;
  }

  get empty(): boolean {
    return this.taken === 0; // while any wait for room, there is no room
  }

  /** Whether there is one to be sent. */
  get ready(): boolean {
    return this.#queue.length > 0;
  }

  add(parcel: Parcel): void {
    this.#waiting.push(parcel);
    this.#fill();
  }

  /** The next one, which is in flight from now on, as bytes. */
  take(now: number): Uint8Array<ArrayBuffer> {
    const parcel = this.#queue.shift();
    if (parcel?.frame === undefined) {
      throw new RangeError("nothing is ready");
    }
    parcel.sent = now;
    this.#flying.set(parcel.id, parcel);
    return parcel.frame;
  }

  /** The one in flight of this id; where the hub could read no id, the oldest, since it answers in order. */
  inFlightAs(id: string): Parcel | undefined {
    return this.#flying.get(id || (this.#flying.keys().next().value ?? ""));
  }

  /** The largest in flight. */
  largest(): Parcel | undefined {
    const size = (parcel: Parcel): number => parcel.frame?.length ?? 0;
    return [...this.#flying.values()].sort((one, other) => size(other) - size(one))[0];
  }

  /** One in flight has had its last answer. */
  done(parcel: Parcel): void {
    this.#flying.delete(parcel.id);
    this.#fill();
  }

  /** Have one in flight sent again, at its place in the order. */
  again(parcel: Parcel): void {
    this.#flying.delete(parcel.id);
    if (!parcel.givenUp) {
      const later = this.#queue.findIndex((other) => other.number > parcel.number);
      this.#queue.splice(later < 0 ? this.#queue.length : later, 0, parcel);
    }
    this.#fill();
  }

  /** The connection is gone: have everything in flight sent again. */
  recall(): void {
    for (const parcel of [...this.#flying.values()].reverse()) {
      parcel.losses += 1;
      this.again(parcel);
    }
  }

  /** Nobody waits for this one any more. */
  giveUp(parcel: Parcel): void {
    parcel.givenUp = true;
    for (const line of [this.#queue, this.#waiting]) {
      const place = line.indexOf(parcel);
      if (place >= 0) {
        line.splice(place, 1);
      }
    }
    this.#fill();
  }

  /** Take out everything, in order. */
  clear(): Parcel[] {
    this.recall();
    return [...this.#queue.splice(0), ...this.#waiting.splice(0)];
  }

  #fill(): void {
    while (this.#waiting.length > 0 && this.taken < this.#most) {
      const parcel = this.#waiting.shift() as Parcel;
      parcel.frame = parcel.write();
      this.#queue.push(parcel);
    }
  }
}
