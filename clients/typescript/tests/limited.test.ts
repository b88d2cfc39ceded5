import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import type { RateLimited } from "@headgate/relay";

import { at, client, closeAll, numbers, play, pythonReceiver, read, until } from "./support.js";
import { Program, withHub, Recorder, ManualHub, ManualTime } from "./support.js";

afterEach(closeAll);

test("d5: 40 envelopes at 20 a second all arrive once and in order, in Python and in TypeScript", withHub, async () => {
  const hub = await Program.open("20", "1", ["writer", "reader"]);
  const recorder = new Recorder();
  const denials: RateLimited[] = [];
  const received = await pythonReceiver(hub.url, "reader", hub.token(1));
  const reader = client(hub.url, "reader", hub.token(1), { inbox: 500 });
  await reader.ready;
  const options = { WebSocket: recorder.WebSocket, onRateLimited: (denial: RateLimited) => denials.push(denial) };
  const writer = client(hub.url, "writer", hub.token(0), options);
  const ids: string[] = [];
  // A slow machine keeps to the limit by itself: it goes on until it was denied.
  while (ids.length < 40 || (denials.length === 0 && ids.length < 400)) {
    const sends = numbers(40, ids.length + 1).map((body) => writer.send("reader", body));
    ids.push(...(await Promise.all(sends)).map(({ id }) => id));
  }
  const sent = numbers(ids.length);
  assert.deepEqual(await received(sent.length), sent);
  assert.deepEqual(await read(reader, sent.length), sent);
  assert.equal(new Set(ids).size, sent.length);
  assert.equal(recorder.assertNeverEarly(), denials.length);
  assert.ok(denials.length > 0);
  for (const { waitMs, reason, id } of denials) {
    assert.ok(waitMs >= 1 && waitMs <= 50, String(waitMs));
    assert.equal(reason, `an address may send 20/second burst 1; send it again in ${waitMs} ms`);
    assert.ok(ids.includes(id));
  }
});

test("d5: 300 envelopes at 1 a second all arrive once and in order, few denied, no time lost", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime(Math.random);
  const recorder = new Recorder(time);
  let denials = 0;
  const reader = client(hub.url, "reader", await hub.register("reader"), { inbox: 300 });
  await reader.ready;
  const writer = client(hub.url, "writer", await hub.register("writer"), {
    WebSocket: recorder.WebSocket,
    runtime: time,
    onRateLimited: () => (denials += 1),
  });
  await writer.ready;
  let answered = 0;
  const sends = numbers(300).map((body) => writer.send("reader", body).then(() => (answered += 1)));
  await play(hub, time, writer, () => answered === 300);
  await Promise.all(sends);
  assert.deepEqual(await read(reader, 300), numbers(300));
  recorder.assertNeverEarly();
  const counted = await hub.counted();
  assert.deepEqual([counted.passed, counted.denied], [300, denials]);
  assert.ok(denials >= 2 && denials <= 12, `${denials} denials`);
  assert.ok(time.now() >= 290_000 && time.now() < 290_000 * 1.005, `${time.now()} ms`);
});

test("d5: a denial is reported, and all is held back until its wait is over, the denied one first", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const recorder = new Recorder(time);
  const denials: RateLimited[] = [];
  const self = client(hub.url, "self", await hub.register("self"), {
    WebSocket: recorder.WebSocket,
    runtime: time,
    onRateLimited: (denial) => denials.push(denial),
  });
  const sends = numbers(11).map((body) => self.send("self", body));
  await until(() => denials.length === 1);
  const later = self.send("self", "later");
  assert.deepEqual(recorder.bodies, numbers(11));
  await hub.advance(999);
  time.advance(999);
  assert.deepEqual(recorder.bodies, numbers(11));
  await hub.advance(1);
  time.advance(1);
  assert.deepEqual(recorder.bodies, [...numbers(11), "11"]);
  const receipts = await Promise.all(sends);
  const reason = "an address may send 1/second burst 10; send it again in 1000 ms";
  assert.deepEqual(denials[0], { waitMs: 1000, reason, id: at(receipts, 10).id });
  await until(() => denials.length === 2);
  await play(hub, time, self, () => self.queued === 0);
  await later;
  assert.deepEqual(await read(self, 12), [...numbers(11), "later"]);
});

test("d5: without a handler, console.warn gets the wait and the reason of each denial", withHub, async (t) => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const warn = t.mock.method(console, "warn", () => undefined);
  for (const handled of [true, false]) {
    let denials = 0;
    const name = `self ${handled}`;
    const options = handled ? { onRateLimited: () => (denials += 1) } : {};
    const self = client(hub.url, name, await hub.register(name), { runtime: time, ...options });
    const sends = numbers(11).map((body) => self.send(name, body));
    await until(() => denials + warn.mock.callCount() === 1);
    await play(hub, time, self, () => self.queued === 0);
    await Promise.all(sends);
    assert.deepEqual([denials, warn.mock.callCount()], handled ? [1, 0] : [0, 1]);
  }
  const reason = "an address may send 1/second burst 10; send it again in 1000 ms";
  assert.deepEqual(warn.mock.calls[0]?.arguments, [`@headgate/relay: rate limited, waiting 1000 ms: ${reason}`]);
});

test("d5: chance only adds to a wait", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_burst: "1" });
  const waits = [[0, 0.1, 1000], [0.999, 0.1, 1100], [0.5, 0.1, 1050], [0.999, 0, 1000]] as const;
  for (const [chance, jitter, wait] of waits) {
    const name = `agent ${chance} ${jitter}`;
    const time = new ManualTime(() => chance);
    const self = client(hub.url, name, await hub.register(name), { runtime: time, jitter });
    await self.send(name, "one");
    const two = self.send(name, "two");
    await until(() => self.inFlight === 0);
    assert.equal(time.next, wait);
    await hub.advance(time.next);
    time.advance(time.next);
    await two;
  }
});

test("d5: twenty that are denied at the same moment do not come back at the same moment", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_burst: "1" });
  const moments: number[] = [];
  for (const number of numbers(20)) {
    const name = `agent ${number}`;
    const time = new ManualTime(Math.random);
    const self = client(hub.url, name, await hub.register(name), { runtime: time });
    await self.send(name, "one");
    self.send(name, "two").catch(() => undefined);
    await until(() => self.inFlight === 0);
    moments.push(time.next);
  }
  assert.ok(new Set(moments).size >= 10, moments.join());
  assert.ok(moments.every((moment) => moment >= 1000 && moment <= 1100), moments.join());
});

test("d5: with several in flight nothing is lost or doubled, and there are never more", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_limit: "10" });
  const time = new ManualTime(Math.random);
  let most = 0;
  const recorder = new Recorder(time);
  const self = client(hub.url, "self", await hub.register("self"), {
    WebSocket: recorder.WebSocket,
    runtime: time,
    inFlight: 8,
    onMessage: ({ body }) => {
      most = Math.max(most, self.inFlight);
      arrived.push(new TextDecoder().decode(body));
    },
  });
  const arrived: string[] = [];
  await self.ready;
  let answered = 0;
  const sends = numbers(100).map((body) => self.send("self", body).then(() => (answered += 1)));
  await until(() => self.inFlight > 0);
  assert.equal(self.inFlight, 8);
  await play(hub, time, self, () => answered === 100);
  await Promise.all(sends);
  await until(() => arrived.length === 100);
  assert.deepEqual([...arrived].sort((one, other) => Number(one) - Number(other)), numbers(100));
  recorder.assertNeverEarly();
  assert.ok(most <= 8);
  assert.ok((await hub.counted()).denied <= 30);
});

test("d5: a timer that fires too early makes nobody send early", withHub, async () => {
  class Hasty extends ManualTime {
    override after(milliseconds: number, call: () => void): () => void {
      return super.after(milliseconds / 2, call);
    }
  }
  const hub = await ManualHub.open();
  const time = new Hasty();
  const recorder = new Recorder(time);
  const { WebSocket } = recorder;
  const self = client(hub.url, "self", await hub.register("self"), { WebSocket, runtime: time });
  await self.ready;
  const sends = numbers(15).map((body) => self.send("self", body));
  await play(hub, time, self, () => self.queued === 0);
  await Promise.all(sends);
  assert.equal(recorder.assertNeverEarly(), 2);
  assert.equal(time.now(), 5000);
});

test("without a limit nothing is held back", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_limit: "off" });
  const self = client(hub.url, "self", await hub.register("self"), { inFlight: 4, runtime: new ManualTime() });
  await Promise.all(numbers(200).map((body) => self.send("self", body)));
  assert.deepEqual(await read(self, 200), numbers(200));
});

test("after a pause, in which its allowance has filled up, a client sends at once again", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const self = client(hub.url, "self", await hub.register("self"), { runtime: time });
  for (const pause of [0, 100_000, 5_000]) {
    await hub.advance(pause);
    time.advance(pause);
    const before = time.now();
    await Promise.all(numbers(pause === 5_000 ? 5 : 10).map((body) => self.send("self", body)));
    assert.equal(time.now(), before);
    const over = numbers(4).map((body) => self.send("self", body));
    await play(hub, time, self, () => self.queued === 0);
    await Promise.all(over);
    assert.equal(time.now(), before + 4000);
  }
});

test("a wait outlives the connection", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const recorder = new Recorder(time);
  const { WebSocket } = recorder;
  const self = client(hub.url, "self", await hub.register("self"), { WebSocket, runtime: time });
  const sends = Promise.all(numbers(11).map((body) => self.send("self", body)));
  await until(() => recorder.bodies.length === 11 && self.inFlight === 0);
  recorder.socket.terminate();
  await until(() => time.next === 500);
  time.advance(500);
  await until(() => recorder.notes.filter(({ envelope }) => envelope.payload.case === "welcome").length === 2);
  assert.equal(recorder.bodies.length, 11);
  assert.equal(time.next, 500);
  await hub.advance(1000);
  time.advance(500);
  await sends;
  recorder.assertNeverEarly();
});
