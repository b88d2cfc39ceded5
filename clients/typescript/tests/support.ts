/** What the tests share: real hubs, recording sockets, and a clock that is advanced by hand. */
import assert from "node:assert/strict";
import { setImmediate } from "node:timers/promises";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import { fromBinary } from "@bufbuild/protobuf";
import { RelayClient, type RelayOptions, type RelaySocketClass, type Runtime, type Unsent } from "@headgate/relay";
import { WebSocket } from "ws";

import { type Envelope, EnvelopeSchema } from "../dist/gen/headgate/v1/envelope_pb.js";
import { builtInSocketClass } from "../dist/runtime.js";

const services = process.env["HEADGATE_TESTS"] ?? "";

/** The options of a test that needs a real hub, which tests/client/test_typescript.py provides. */
export const withHub = {
  skip: services === "" && "needs a hub: run pytest tests/client/test_typescript.py",
  timeout: 300_000,
};

/** Asks the test services for something that only Python can do. */
async function ask<T>(what: string, details: object): Promise<T> {
  const response = await fetch(services, { method: "POST", body: JSON.stringify({ do: what, ...details }) });
  const answer: unknown = await response.json();
  assert.equal(response.status, 200, String(answer));
  return answer as T;
}

/** A hub whose clock is advanced by hand, by default with a limit of 1 message a second and a burst of 10. */
export class ManualHub {
  private constructor(
    readonly url: string,
    readonly number: number,
  ) {}

  static async open(settings: { relay_rate_limit?: string; relay_rate_burst?: string } = {}): Promise<ManualHub> {
    const { hub, url } = await ask<{ hub: number; url: string }>("manual", settings);
    return new ManualHub(url, hub);
  }

  register(agent: string): Promise<string> {
    return ask("register", { hub: this.number, agent });
  }

  revoke(agent: string): Promise<null> {
    return ask("revoke", { hub: this.number, agent });
  }

  advance(ms: number): Promise<null> {
    return ask("advance", { hub: this.number, ms });
  }

  counted(): Promise<{ passed: number; denied: number; connections: number }> {
    return ask("counted", { hub: this.number });
  }
}

/** A hub on such a clock, with an account that has 10 dollars, and its agent `planner` that has 2 slots. */
export class AccountHub {
  private constructor(
    readonly url: string,
    readonly token: string,
    readonly number: number,
  ) {}

  static async open(): Promise<AccountHub> {
    const { hub, url, token } = await ask<{ hub: number; url: string; token: string }>("accounts", {});
    return new AccountHub(url, token, hub);
  }

  /** The dollars and the slots that are left. */
  left(): Promise<string> {
    return ask("left", { hub: this.number });
  }

  advance(ms: number): Promise<null> {
    return ask("advance", { hub: this.number, ms });
  }
}

/** The program `headgate serve`. */
export class Program {
  private constructor(
    readonly url: string,
    readonly number: number,
    readonly tokens: string[],
  ) {}

  static async open(rate: string, burst: string, agents: string[]): Promise<Program> {
    type Opened = { hub: number; url: string; tokens: string[] };
    const { hub, url, tokens } = await ask<Opened>("program", { rate, burst, agents });
    return new Program(url, hub, tokens);
  }

  token(place: number): string {
    return at(this.tokens, place);
  }

  do(what: "freeze" | "kill" | "stop" | "start"): Promise<null> {
    return ask(what, { hub: this.number });
  }
}

const ports = new Map<string, Promise<number>>();

/** The port of a server of tests/support, which runs until the tests are over. */
export function serverPort(module: "case_server" | "misbehaving_server"): Promise<number> {
  const port = ports.get(module) ?? ask<number>("server", { module });
  ports.set(module, port);
  return port;
}

/** An agent that receives in Python: a function that waits for so many bodies. */
export async function pythonReceiver(
  url: string,
  agent: string,
  token: string,
): Promise<(count: number) => Promise<string[]>> {
  const receiver = await ask<number>("receive", { url, agent, token });
  return (count) => ask("received", { receiver, count });
}

/** Time that passes only when a test advances it. It counts whole milliseconds. */
export class ManualTime implements Runtime {
  #now = 0;
  readonly #timers = new Set<{ at: number; call: () => void }>();

  constructor(readonly random: () => number = () => 0) {}

  now(): number {
    return this.#now;
  }

  after(milliseconds: number, call: () => void): () => void {
    const timer = { at: Math.ceil(this.#now + milliseconds), call };
    this.#timers.add(timer);
    return () => this.#timers.delete(timer);
  }

  /** How long until the next timer fires. */
  get next(): number {
    return Math.min(...[...this.#timers].map(({ at }) => at)) - this.#now;
  }

  advance(milliseconds: number): void {
    this.#now += milliseconds;
    for (const timer of [...this.#timers].sort((one, other) => one.at - other.at)) {
      if (timer.at <= this.#now && this.#timers.delete(timer)) {
        timer.call();
      }
    }
  }
}

/** A frame that has passed over a socket, and when. */
export interface Note {
  readonly at: number;
  readonly sent: boolean;
  readonly envelope: Envelope;
}

/** A class of real WebSockets that record their frames. */
export class Recorder {
  readonly notes: Note[] = [];
  readonly sockets: WebSocket[] = [];
  readonly WebSocket: RelaySocketClass;

  constructor(time: { now(): number } = performance) {
    const { notes, sockets } = this;
    const note = (sent: boolean, data: unknown): void => {
      const envelope = fromBinary(EnvelopeSchema, new Uint8Array(data as ArrayBuffer));
      notes.push({ at: time.now(), sent, envelope });
    };
    this.WebSocket = class extends WebSocket {
      constructor(url: string) {
        super(url);
        sockets.push(this);
        this.addEventListener("message", ({ data }) => note(false, data));
      }

      override send(data: Uint8Array<ArrayBuffer>): void {
        note(true, data);
        super.send(data);
      }
    };
  }

  /** The bodies that were sent, in order. */
  get bodies(): string[] {
    return this.notes.flatMap(({ sent, envelope }) => {
      return sent && envelope.payload.case === "data" ? [text(envelope.payload.value.body)] : [];
    });
  }

  get socket(): WebSocket {
    return at(this.sockets, this.sockets.length - 1);
  }

  /** Nothing was sent while the hub had asked to wait. Returns how often it had. */
  assertNeverEarly(): number {
    let denials = 0;
    let until = -Infinity;
    for (const { at, sent, envelope } of this.notes) {
      const { case: kind, value } = envelope.payload;
      if (!sent && kind === "rateLimited") {
        denials += 1;
        until = at + Number(value.retryAfterMs);
      } else if (sent && kind === "data") {
        assert.ok(at >= until, `sent ${until - at} ms early`);
      }
    }
    return denials;
  }
}

export type SocketKind = "ws" | "built-in";

/** The WebSocket of the package `ws`, or the built-in one as the client takes it. */
export function socketClass(kind: SocketKind): RelaySocketClass {
  return kind === "ws" ? WebSocket : builtInSocketClass();
}

const clients: [RelayClient, Runtime | undefined][] = [];

/** A client, which `closeAll` closes. */
export function client(url: string, address: string, token: string, options: Partial<RelayOptions> = {}): RelayClient {
  const made = new RelayClient(url, { address, token, WebSocket, ...options });
  clients.push([made, options.runtime]);
  return made;
}

/** Closes the clients of a test: for `afterEach`. */
export async function closeAll(): Promise<void> {
  await Promise.all(clients.splice(0).map(([one, time]) => closeNow(one, time)));
}

/** Closes a client at once, also if the other side does not answer, and its clock stands still. */
export async function closeNow(client: RelayClient, time?: Runtime): Promise<Unsent[]> {
  let unsent: Unsent[] | undefined;
  void client.close({ withinMs: 0 }).then((found) => (unsent = found));
  await until(() => {
    if (unsent === undefined && time instanceof ManualTime) {
      time.advance(1000);
    }
    return unsent;
  });
  return unsent ?? [];
}

/** Waits until a condition holds. */
export async function until(condition: () => unknown, what = (): string => String(condition)): Promise<void> {
  const deadline = performance.now() + 60_000;
  while (!(await condition())) {
    assert.ok(performance.now() < deadline, `not within 60 s: ${what()}`);
    await setImmediate();
  }
}

/** Advances the time of a hub and a client together, from timer to timer, until a condition holds. */
export async function play(hub: ManualHub, time: ManualTime, client: RelayClient, done: () => boolean): Promise<void> {
  while (!done()) {
    await until(() => done() || (client.inFlight === 0 && client.queued > 0 && time.next < Infinity));
    if (!done()) {
      const step = time.next;
      await hub.advance(step);
      time.advance(step);
    }
  }
}

/** Reads so many messages, as text. */
export async function read(client: RelayClient, count: number): Promise<string[]> {
  const found: string[] = [];
  while (found.length < count) {
    const { value } = await client[Symbol.asyncIterator]().next();
    assert.ok(value !== undefined, "the messages have ended");
    found.push(text(value.body));
  }
  return found;
}

export function numbers(count: number, first = 1): string[] {
  return Array.from({ length: count }, (_, number) => String(first + number));
}

export function text(body: Uint8Array): string {
  return new TextDecoder().decode(body);
}

export function at<T>(list: readonly T[], place: number): T {
  const found = list[place];
  assert.ok(found !== undefined, `expected more than ${place}, got ${list.length}`);
  return found;
}

/** What a promise was rejected with. */
export async function rejection(promise: Promise<unknown>): Promise<unknown> {
  try {
    await promise;
  } catch (error) {
    return error;
  }
  return assert.fail("expected it to be rejected");
}

/** The bytes of the heap that are used after everything else was collected. */
export function usedHeap(): number {
  setFlagsFromString("--expose-gc");
  (runInNewContext("gc") as () => void)();
  return process.memoryUsage().heapUsed;
}
