/** Envelopes that pass at the learned pace before it is probed whether more would pass. */
const TRUSTED = 50;

/**
 * When the next envelope may be sent: never earlier than the hub said, and then as fast as the hub allows.
 *
 * A denial says when the next envelope can pass. Two denials, and the number of envelopes that passed in between, reveal
 * the interval: from then on envelopes are sent at that interval, instead of each being denied once. A raised limit or a
 * full bucket can't be seen from here; it is probed: after 50 envelopes, and after a pause in which there was nothing to
 * send, envelopes go out freely until one is denied again.
 *
 * All times are milliseconds of one clock that only goes forward.
 */
export class Pace {
  #free = true;
  #until = -Infinity;
  #interval: number | undefined;
  // The measurement of the next interval: the moment that the last denial named, and what has happened since.
  #since: number | undefined;
  #wait = 0;
  #passed = 0;
  #idle = 0;

  /** Whether several envelopes may be in flight. */
  get free(): boolean {
    return this.#free;
  }

  /** How long to wait before the next envelope. */
  wait(now: number): number {
    return Math.max(0, this.#until - now);
  }

  /** An envelope that was sent at this moment has passed. */
  passed(sent: number): void {
    this.#passed += 1;
    if (this.#passed >= TRUSTED) {
      this.#free = true;
    }
    if (!this.#free && this.#interval !== undefined) {
      this.#until = Math.max(this.#until, sent + this.#interval);
    }
  }

  /** An envelope was denied, for `wait` milliseconds from now; `jitter` is added. */
  denied(now: number, wait: number, jitter: number): void {
    const next = now + wait;
    if (this.#since !== undefined && this.#passed > 0) {
      this.#interval = Math.max(0, next - this.#since) / this.#passed;
    }
    this.#since = next;
    this.#wait = wait;
    this.#passed = 0;
    this.#idle = 0;
    this.#free = false;
    this.#until = Math.max(this.#until, next + jitter);
  }

  /** There was nothing to send between two moments. */
  idle(from: number, to: number): void {
    this.#idle += Math.max(0, to - Math.max(from, this.#until));
    if (this.#idle > (this.#interval ?? this.#wait)) {
      this.interrupted();
    }
  }

  /** Ends the measurement: the hub may have more quota by now. */
  interrupted(): void {
    this.#since = undefined;
    this.#free = true;
  }
}
