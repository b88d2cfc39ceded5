/** So many envelopes pass at the learned pace before it is tried again whether there is room for more. */
const TRUSTED = 50;

/**
 * When the next envelope may be sent: never before the hub said, and then as fast as the hub lets through.
 *
 * A denial says when the next envelope can pass. Two of them, with so many envelopes between that did pass, say how far
 * apart envelopes may be sent: from then on they are sent that far apart, instead of each being denied once. What can't
 * be seen from here, a limit that was raised or an allowance that has filled up, is found out by trying: after 50
 * envelopes, and after a pause in which there was nothing to send, they go as they come until one is denied again.
 *
 * All times are milliseconds of one clock that only goes forward.
 */
export class Pace {
  #free = true;
  #until = -Infinity;
  #interval: number | undefined;
  // What the next interval is measured by: the moment that the last denial named, and what has happened since.
  #since: number | undefined;
  #wait = 0;
  #passed = 0;
  #idle = 0;

  /** Whether nothing is known that speaks against several envelopes at once. */
  get free(): boolean {
    return this.#free;
  }

  /** How long to wait before anything is sent. */
  wait(now: number): number {
    return Math.max(0, this.#until - now);
  }

  /** An envelope that was sent at this moment was let through. */
  passed(sent: number): void {
    this.#passed += 1;
    if (this.#passed >= TRUSTED) {
      this.#free = true;
    }
    if (!this.#free && this.#interval !== undefined) {
      this.#until = Math.max(this.#until, sent + this.#interval);
    }
  }

  /** An envelope was denied, for `wait` milliseconds from now on; `extra` are added to them. */
  denied(now: number, wait: number, extra: number): void {
    const next = now + wait;
    if (this.#since !== undefined && this.#passed > 0) {
      this.#interval = Math.max(0, next - this.#since) / this.#passed;
    }
    this.#since = next;
    this.#wait = wait;
    this.#passed = 0;
    this.#idle = 0;
    this.#free = false;
    this.#until = Math.max(this.#until, next + extra);
  }

  /** There was nothing to send between two moments. */
  idle(from: number, to: number): void {
    this.#idle += Math.max(0, to - Math.max(from, this.#until));
    if (this.#idle > (this.#interval ?? this.#wait)) {
      this.interrupted();
    }
  }

  /** What was measured so far can't be continued: the hub may have let through more in the meantime. */
  interrupted(): void {
    this.#since = undefined;
    this.#free = true;
  }
}
