import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { RelayError } from "@headgate/relay";

import { client, closeAll, numbers, play, read, rejection, text, until } from "./support.js";
import { Program, withHub, Recorder, ManualHub, ManualTime } from "./support.js";

afterEach(closeAll);

test("d5: the queue is bounded: what is more waits for room, and all arrive in order", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_burst: "1" });
  const time = new ManualTime();
  const self = client(hub.url, "self", await hub.register("self"), { runtime: time, most: 4 });
  await self.ready;
  const sends = numbers(12).map((body) => self.send("self", body));
  assert.deepEqual([self.queued, self.waiting], [4, 8]);
  await play(hub, time, self, () => {
    assert.ok(self.queued <= 4);
    return self.queued === 0;
  });
  await Promise.all(sends);
  assert.deepEqual(await read(self, 12), numbers(12));
});

test("d5: what is given up before it was sent, or after it was denied, never arrives", withHub, async () => {
  const hub = await ManualHub.open({ relay_rate_burst: "1" });
  const time = new ManualTime();
  const recorder = new Recorder(time);
  const { WebSocket } = recorder;
  const self = client(hub.url, "self", await hub.register("self"), { WebSocket, runtime: time, most: 4 });
  await self.ready;
  const aborts = new Map(numbers(8).map((body) => [body, new AbortController()]));
  const sends = [...aborts].map(([body, { signal }]) => self.send("self", body, { signal }).catch(() => body));
  await until(() => recorder.bodies.length === 2 && self.inFlight === 0); // the second was denied
  assert.deepEqual([self.queued, self.waiting], [4, 3]);
  for (const body of ["2", "4", "7"]) {
    aborts.get(body)?.abort();
  }
  assert.deepEqual([self.queued, self.waiting], [4, 0]);
  await play(hub, time, self, () => self.queued === 0);
  const given = (await Promise.all(sends)).filter((answer) => typeof answer === "string");
  assert.deepEqual(given, ["2", "4", "7"]);
  assert.deepEqual(await read(self, 5), ["1", "3", "5", "6", "8"]);
  assert.deepEqual(recorder.bodies.filter((body) => given.includes(body)), ["2"]);
});

test("a signal rejects with its reason, at once where it was given too late", withHub, async () => {
  const hub = await ManualHub.open();
  const self = client(hub.url, "self", await hub.register("self"));
  const reason = new Error("changed my mind");
  assert.equal(await rejection(self.send("self", "1", { signal: AbortSignal.abort(reason) })), reason);
  const abort = new AbortController();
  const sent = self.send("self", "2", { signal: abort.signal });
  abort.abort(reason);
  assert.equal(await rejection(sent), reason);
  await self.send("self", "3");
  assert.deepEqual(await read(self, 1), ["3"]);
});

test("d5: close waits for what is queued, and takes nothing more", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const reader = client(hub.url, "reader", await hub.register("reader"));
  await reader.ready;
  const self = client(hub.url, "self", await hub.register("self"), { runtime: time, most: 5 });
  await self.ready;
  const sends = numbers(12).map((body) => self.send("reader", body));
  const closed = self.close({ withinMs: 60_000 });
  const refused = await rejection(self.send("reader", "13"));
  assert.ok(refused instanceof RelayError);
  assert.equal(refused.code, "closed");
  await play(hub, time, self, () => self.queued === 0);
  assert.deepEqual(await closed, []);
  await Promise.all(sends);
  assert.deepEqual(await read(reader, 12), numbers(12));
  assert.equal(time.next, Infinity);
  assert.deepEqual(await self[Symbol.asyncIterator]().next(), { value: undefined, done: true });
  await until(async () => (await hub.counted()).connections === 1);
});

test("d5: close does not wait for ever, and says what was not sent", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const self = client(hub.url, "self", await hub.register("self"), { runtime: time, most: 2 });
  await self.ready;
  const sends = numbers(13).map((body) => self.send("self", body, { contentType: "x/y" }).catch((error) => error));
  await until(() => self.queued + self.waiting === 3 && self.inFlight === 0);
  const closed = self.close({ withinMs: 500 });
  assert.equal(self.close(), closed);
  time.advance(500);
  const unsent = await closed;
  assert.deepEqual(
    unsent.map(({ to, body, contentType, mayHaveArrived }) => [to, text(body), contentType, mayHaveArrived]),
    ["11", "12", "13"].map((body) => ["self", body, "x/y", false]),
  );
  const errors = (await Promise.all(sends)).slice(10);
  assert.ok(errors.every((error) => error instanceof RelayError && error.code === "closed"));
  assert.equal(time.next, Infinity);
});

test("close says what the hub may have got without having answered", withHub, async () => {
  const hub = await Program.open("20", "10", ["self"]);
  const self = client(hub.url, "self", hub.token(0));
  await self.ready;
  await hub.do("freeze");
  const sends = numbers(2).map((body) => rejection(self.send("self", body)));
  const unsent = await self.close({ withinMs: 10 });
  assert.deepEqual(unsent.map(({ body, mayHaveArrived }) => [text(body), mayHaveArrived]), [["1", true], ["2", false]]);
  await Promise.all(sends);
  await hub.do("kill");
});

test("a client that never had a connection can be closed", async () => {
  const time = new ManualTime();
  let failures = 0;
  const options = { runtime: time, onDisconnected: () => (failures += 1) };
  const self = client("ws://127.0.0.1:1/relay", "self", "token", options);
  const sent = rejection(self.send("other", "1"));
  await until(() => failures === 1);
  assert.equal((await self.close({ withinMs: 0 })).length, 1);
  assert.equal(((await sent) as RelayError).code, "closed");
  assert.equal(((await rejection(self.ready)) as RelayError).code, "closed");
  assert.equal(time.next, Infinity);
});

test("a client that is just connecting can be closed", withHub, async () => {
  const hub = await ManualHub.open();
  const self = client(hub.url, "self", await hub.register("self"));
  assert.deepEqual(await self.close(), []);
  assert.equal(((await rejection(self.ready)) as RelayError).code, "closed");
});
