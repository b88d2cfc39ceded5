import { RelayError } from "./errors.js";
import type { Envelope } from "./gen/headgate/v1/envelope_pb.js";
import { type Ending, Link } from "./link.js";
import type { Disconnected, RateLimited, Settings } from "./options.js";

/** What a line tells. */
export interface LineListener {
  /** There is a connection, and the hub knows who this is. */
  up(): void;
  received(envelope: Envelope): void;
  /** The connection is gone; nothing that was sent over it will be answered any more. */
  down(ending: Ending): void;
  /** The hub has denied a connection for a while. */
  limited(denial: RateLimited): void;
  /** Another connection will be tried. */
  trying(loss: Disconnected): void;
  /** The hub will not have this client, whatever it does: the line has ended. */
  refused(error: RelayError): void;
}

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 30_000;
const FAREWELL_MS = 1000;
const OURS = 4000; // the close code for what ended here: those from 4000 on are left to applications

/**
 * A connection to a relay, and another one after it whenever it is lost, until the line is closed or the hub refuses.
 *
 * Before each new one it waits: as long as the hub has said when it left, otherwise twice as long each time, from a
 * quarter of a second to half a minute, less up to a half by chance.
 */
export class Line {
  readonly #settings: Settings;
  readonly #listener: LineListener;
  #link: Link | undefined;
  #failures = 0; // in a row
  #begun = 0;
  #stopTimer: (() => void) | undefined; // for WELCOME, or for the next connection
  #ended: (() => void) | undefined; // once the line is being closed

  constructor(settings: Settings, listener: LineListener) {
    this.#settings = settings;
    this.#listener = listener;
    this.#connect();
  }

  /** Whether anything can be sent. */
  get isUp(): boolean {
    return this.#link?.welcomed ?? false;
  }

  send(frame: Uint8Array<ArrayBuffer>): void {
    this.#link?.send(frame);
  }

  /** The connection is of no use any more. */
  abandon(reason: string): void {
    this.#link?.abandon(OURS, reason);
  }

  /** Takes leave, and resolves when the other side has done so too, which it is not given long for. */
  async close(): Promise<void> {
    this.#stopTimer?.();
    const link = this.#link;
    if (link !== undefined) {
      const stop = this.#settings.after(FAREWELL_MS, () => link.abandon(OURS, "no answer to the farewell"));
      await new Promise<void>((resolve) => {
        this.#ended = resolve;
        link.close();
      });
      stop();
    }
  }

  #connect(): void {
    const { url, address, token, WebSocket, answerWithinMs, now, after } = this.#settings;
    this.#begun = now();
    this.#link = new Link(WebSocket, url, address, token, {
      welcomed: () => {
        this.#stopTimer?.();
        this.#listener.up();
      },
      refused: (answer) => this.#refused(answer),
      received: (envelope) => this.#listener.received(envelope),
      ended: (ending) => this.#lost(ending),
    });
    this.#stopTimer = after(answerWithinMs, () => this.abandon(`no WELCOME within ${answerWithinMs} ms`));
  }

  #refused(answer: Envelope): void {
    const { case: kind, value } = answer.payload;
    if (kind === "error" && (value.code === "unauthorized" || value.code === "invalid")) {
      void this.close();
      this.#listener.refused(new RelayError(value.code, value.detail));
    } else if (kind === "rateLimited") {
      const waitMs = Number(value.retryAfterMs);
      this.#listener.limited({ waitMs, reason: value.reason, id: "" });
      this.abandon(`denied; retry in ${waitMs} ms`);
    } else {
      this.abandon(kind === "error" ? `${value.code}: ${value.detail}` : "expected WELCOME, got something else");
    }
  }

  #lost(ending: Ending): void {
    this.#stopTimer?.();
    this.#link = undefined;
    this.#listener.down(ending);
    if (this.#ended !== undefined) {
      this.#ended();
      return;
    }
    const retryInMs = this.#pause(ending);
    this.#listener.trying({ ...ending, retryInMs });
    this.#stopTimer = this.#settings.after(retryInMs, () => this.#connect());
  }

  /** How long to wait before the next connection. */
  #pause({ reason }: Ending): number {
    const { now, random, jitter } = this.#settings;
    const said = /retry in (\d{1,12}) ms/.exec(reason)?.[1];
    if (said !== undefined) {
      return Number(said) * (1 + random() * jitter);
    }
    const longest = (failures: number): number => Math.min(FIRST_PAUSE_MS * 2 ** failures, LONGEST_PAUSE_MS);
    if (now() - this.#begun > longest(this.#failures)) {
      this.#failures = 0; // it has held for a while
    }
    const pause = longest(this.#failures) * (1 - random() / 2);
    this.#failures += 1;
    return pause;
  }
}
