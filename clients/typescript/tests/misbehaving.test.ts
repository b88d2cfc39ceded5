/** The client against servers that misbehave at random, by their seeds: tests/support/misbehaving_server.py. */
import assert from "node:assert/strict";
import { afterEach, beforeEach, test } from "node:test";

import { RelayClient, type RelayError } from "@headgate/relay";

import { at, closeNow, ManualTime, numbers, serverPort, type SocketKind, socketClass, text, until } from "./support.js";
import { usedHeap, withHub } from "./support.js";

const SENDS = 40;
const AT_ONCE = 25; // seeds
const IDLE_MS = 250; // real time after which nothing more is expected of a server, and the client's deadlines pass
const LASTING_MS = 30_000; // a connection that has lasted longer was of use
const MOST_GROWTH = 2 ** 21; // bytes that the heap may grow after the first seeds: sockets that are kept would be more

const { error } = console;
beforeEach(() => {
  console.error = () => undefined; // a mock would keep all that is logged
});
afterEach(() => {
  console.error = error;
});

test("nothing is lost, doubled or out of order, and nobody storms: 200 seeds with `ws`", withHub, () => {
  return trials("ws", 0, 200);
});

test("the same with the built-in WebSocket: 100 other seeds", withHub, () => {
  return trials("built-in", 200, 300);
});

async function trials(kind: SocketKind, from: number, to: number): Promise<void> {
  let heap: number | undefined;
  for (let first = from; first < to; first += AT_ONCE) {
    await Promise.all(Array.from({ length: AT_ONCE }, (_, number) => trial(kind, first + number)));
    const used = usedHeap();
    heap ??= used;
    assert.ok(used - heap < MOST_GROWTH, `${used - heap} bytes more by seed ${first + AT_ONCE}`);
  }
}

interface Log {
  readonly accepted: [number, string, string][];
  readonly messages: string[];
}

async function trial(kind: SocketKind, seed: number): Promise<void> {
  const address = `127.0.0.1:${await serverPort("misbehaving_server")}/${seed}/relay`;
  const time = new ManualTime(Math.random);
  const attempts: { at: number; worked: boolean }[] = [];
  const messages: string[] = [];
  const denied = new Set<string>();
  const inFlight = seed % 3 === 0 ? 4 : 1;
  let active = performance.now();
  let waitsUntil = 0;
  const worked = (): void => {
    at(attempts, attempts.length - 1).worked = true;
    active = performance.now();
  };
  const SocketClass = socketClass(kind);
  const options = {
    address: "alice",
    token: "token",
    runtime: time,
    inFlight,
    most: 16,
    WebSocket: class extends SocketClass {
      constructor(url: string) {
        super(url);
        attempts.push({ at: time.now(), worked: false });
        active = performance.now();
      }
    },
    onMessage({ body }: { body: Uint8Array }): void {
      messages.push(text(body));
      worked();
    },
    onDisconnected({ retryInMs }: { retryInMs: number }): void {
      if (time.now() - at(attempts, attempts.length - 1).at > LASTING_MS) {
        worked();
      }
      waitsUntil = time.now() + retryInMs;
    },
    onRateLimited({ id, waitMs }: { id: string; waitMs: number }): void {
      denied.add(id);
      waitsUntil = Math.max(waitsUntil, time.now() + waitMs * 1.1);
    },
  };
  const self = new RelayClient(`ws://${address}`, options);
  const acknowledged: string[] = [];
  let refused = 0;
  for (const body of numbers(SENDS)) {
    self.send("bob", body).then(
      () => acknowledged.push(body) && worked(),
      ({ code }: RelayError) => {
        assert.equal(code, "busy");
        refused += 1;
        worked();
      },
    );
  }
  await until(
    () => {
      const due = time.now() + time.next <= waitsUntil + 1 || performance.now() - active > IDLE_MS;
      if (due && time.next < Infinity) {
        active = performance.now();
        time.advance(time.next);
      }
      return acknowledged.length + refused === SENDS;
    },
    () => `${seed}: ${acknowledged.length} acknowledged, ${refused} refused`,
  );
  assert.deepEqual(await closeNow(self, time), []);
  assert.equal(time.next, Infinity);
  const log = (await (await fetch(`http://${address}/log`)).json()) as Log;
  const accepted = log.accepted.map(([connection, id, body]) => ({ connection, id, number: Number(body) }));
  const found = new Set(accepted.map(({ number }) => number));
  assert.ok(acknowledged.every((body) => found.has(Number(body))), `${seed}: something acknowledged is lost`);
  for (const [place, { connection, id, number }] of accepted.entries()) {
    const earlier = accepted.slice(0, place);
    const twice = earlier.some((other) => other.connection === connection && other.id === id);
    assert.ok(!twice, `${seed}: ${number} came twice on one connection`);
    const overtakes = inFlight > 1 ? (one: string) => denied.has(one) : () => false;
    const later = earlier.some(
      (other) => other.number > number && other.connection === connection && !overtakes(id) && !overtakes(other.id),
    );
    assert.ok(!later, `${seed}: ${number} came after a later one`);
  }
  if (inFlight === 1) {
    const order = accepted.map(({ number }) => number);
    assert.deepEqual(order, [...order].sort((one, other) => one - other), String(seed));
  }
  assert.deepEqual(messages, log.messages.filter((body) => messages.includes(body)), String(seed));
  let failures = 0;
  for (const [place, { at: moment, worked }] of attempts.entries()) {
    const gap = moment - (attempts[place - 1]?.at ?? -Infinity);
    assert.ok(failures < 3 || gap >= 1000, `${seed}: the next attempt came ${gap} ms after failure ${failures}`);
    failures = worked ? 0 : failures + 1;
  }
}
