/** The table of cases that the clients in Python and in TypeScript have in common: tests/client/client_cases.json. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { afterEach, test } from "node:test";

import type { Disconnected, Message, RateLimited, RelayError } from "@headgate/relay";

import { at, client, closeAll, closeNow, ManualTime, rejection, serverPort, text, until, withHub } from "./support.js";
import { type SocketKind, socketClass } from "./support.js";

afterEach(closeAll);

interface Case {
  readonly name: string;
  readonly only?: "hub" | "relay";
  readonly needs?: "status" | "body";
  readonly client?: {
    readonly sends?: number;
    readonly bytes?: number;
    readonly in_flight?: number;
    readonly buffer?: number;
    readonly reads?: boolean;
    readonly listeners?: "throw";
  };
  readonly expected: {
    readonly waits?: readonly Range[];
    readonly denied?: readonly Range[];
    readonly sends?: readonly string[];
    readonly final?: string;
    readonly messages?: readonly string[];
    readonly frames?: readonly string[];
    readonly unreadable?: number;
    readonly dropped?: number;
    readonly connections?: number;
  };
}

type Range = readonly [number, number];
type Log = { connections: number; frames: string[]; silent: number };

const ANSWER_WITHIN_MS = 30_000;
const table = new URL("../../../tests/client/client_cases.json", import.meta.url);
const { cases } = JSON.parse(readFileSync(table, "utf8")) as { cases: Case[] };

for (const [place, given] of cases.entries()) {
  for (const kind of ["ws", "built-in"] as const) {
    if (given.only !== "hub" && (given.needs === undefined || kind === "ws")) {
      test(`${kind}: ${given.name}`, withHub, (t) => {
        t.mock.method(console, "error", () => undefined);
        return run(given, place, kind);
      });
    }
  }
}

async function run({ client: how = {}, expected }: Case, place: number, kind: SocketKind): Promise<void> {
  const { waits = [], denied = [], sends = [], final } = expected;
  const address = `127.0.0.1:${await serverPort("case_server")}/${place}/${kind}`;
  const time = new ManualTime(Math.random);
  const losses: Disconnected[] = [];
  const denials: RateLimited[] = [];
  const messages: string[] = [];
  let waitsUntil = 0; // as the client has reported
  const listener = <T>(hear: (what: T) => void): ((what: T) => void) => {
    return (what) => {
      hear(what);
      if (how.listeners === "throw") {
        throw new Error("as the case says");
      }
    };
  };
  const options = {
    WebSocket: socketClass(kind),
    runtime: time,
    answerWithinMs: ANSWER_WITHIN_MS,
    inFlight: how.in_flight ?? 1,
    inbox: how.buffer ?? 256,
    onDisconnected: listener((loss: Disconnected) => {
      losses.push(loss);
      waitsUntil = time.now() + loss.retryInMs;
    }),
    onRateLimited: listener((denial: RateLimited) => {
      if (denial.id !== "") {
        denials.push(denial);
        waitsUntil = Math.max(waitsUntil, time.now() + denial.waitMs * 1.1);
      }
    }),
    onDropped: listener(() => undefined),
    ...(how.reads === false ? {} : { onMessage: listener(({ body }: Message) => messages.push(text(body))) }),
  };
  const self = client(`ws://${address}/relay`, "alice", "token", options);
  const ends: (string | undefined)[] = Array.from({ length: how.sends ?? 0 });
  for (const number of ends.keys()) {
    self.send("bob", String(number).padEnd(how.bytes ?? 0)).then(
      () => (ends[number] = "acknowledged"),
      (error: RelayError) => (ends[number] = error.code),
    );
  }
  let ended = final === undefined;
  const end = (): boolean => (ended = true);
  self.ready.then(end, end);
  const answered = sends.filter((end) => end !== "closed").length;
  const log = async (): Promise<Log> => (await fetch(`http://${address}/log`)).json() as Promise<Log>;
  const isOver = (): boolean =>
    losses.length >= waits.length &&
    denials.length >= denied.length &&
    ends.filter((end) => end !== undefined).length >= answered &&
    messages.length >= (expected.messages?.length ?? 0) &&
    self.unreadable >= (expected.unreadable ?? 0) &&
    self.dropped >= (expected.dropped ?? 0) &&
    ended;
  let silent = 0;
  let idle = 0;
  await until(async () => {
    if (isOver()) {
      return true;
    }
    idle += 1;
    if (time.now() + time.next <= waitsUntil + 1) {
      idle = 0;
      time.advance(time.next);
    } else if ((await log()).silent > silent && (await log()).silent > silent) {
      silent += 1;
      time.advance(ANSWER_WITHIN_MS);
    } else if (kind === "built-in" && idle > 1000) {
      idle = 0; // it does not show a close until the server has hung up
      time.advance(ANSWER_WITHIN_MS);
    }
    return false;
  }, () => JSON.stringify({ losses, denials, ends, messages, queued: self.queued, next: time.next }));
  if (final !== undefined) {
    assert.equal(((await rejection(self.send("bob", "later"))) as RelayError).code, final);
  }
  await closeNow(self, time);
  assert.equal(time.next, Infinity); // nothing more is due
  within(losses.map(({ retryInMs }) => retryInMs), waits);
  within(denials.map(({ waitMs }) => waitMs), denied);
  assert.deepEqual(ends, sends);
  const { connections, frames } = await log();
  assert.deepEqual(
    { messages, unreadable: self.unreadable, dropped: self.dropped, connections, frames },
    {
      messages: expected.messages ?? [],
      unreadable: expected.unreadable ?? 0,
      dropped: expected.dropped ?? 0,
      connections: expected.connections ?? connections,
      frames: expected.frames ?? frames,
    },
  );
}

function within(found: readonly number[], expected: readonly Range[]): void {
  const what = `${found.join()} is not ${expected.map(([least, most]) => `${least}-${most}`).join()}`;
  assert.equal(found.length, expected.length, what);
  for (const [place, [least, most]] of expected.entries()) {
    assert.ok(at(found, place) >= least && at(found, place) <= most, what);
  }
}
