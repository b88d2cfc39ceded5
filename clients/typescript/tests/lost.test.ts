import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { type Disconnected, type RateLimited, RelayError } from "@headgate/relay";

import { MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";
import { at, client, closeAll, numbers, read, rejection, until } from "./support.js";
import { Program, withHub, Recorder, ManualHub, ManualTime } from "./support.js";
import { ack, closeServers, SmallServer, welcome } from "./server.js";

afterEach(closeAll);
afterEach(closeServers);

test("d5: a hub that is killed and started again gets what it had not answered: nothing is lost", withHub, async () => {
  const hub = await Program.open("20", "10", ["self"]);
  const losses: Disconnected[] = [];
  const self = client(hub.url, "self", hub.token(0), { onDisconnected: (loss) => losses.push(loss) });
  await Promise.all(numbers(12).map((body) => self.send("self", body)));
  assert.deepEqual(await read(self, 12), numbers(12));
  await hub.do("freeze");
  const sends = numbers(10, 13).map((body) => self.send("self", body));
  await until(() => self.inFlight === 1);
  await hub.do("kill");
  await until(() => losses.length > 0);
  assert.equal(at(losses, 0).code, 1006);
  assert.equal(self.queued, 10);
  await hub.do("start");
  await Promise.all(sends);
  assert.deepEqual(await read(self, 10), numbers(10, 13));
});

test("d5: a hub that restarts says when to come back, and no client comes before", withHub, async () => {
  const hub = await Program.open("20", "10", ["self"]);
  const losses: Disconnected[] = [];
  const time = new ManualTime(() => 0.5);
  const recorder = new Recorder();
  const { WebSocket } = recorder;
  const options = { WebSocket, runtime: time, onDisconnected: (loss: Disconnected) => losses.push(loss) };
  const self = client(hub.url, "self", hub.token(0), options);
  await self.send("self", "1");
  await hub.do("stop");
  await until(() => losses.length === 1);
  const { code, reason, retryInMs } = at(losses, 0);
  const said = Number(/^restarting; retry in (\d+) ms$/.exec(reason)?.[1]);
  assert.equal(code, 1012);
  assert.ok(said >= 1000);
  assert.ok(Math.abs(retryInMs - said * 1.05) < 0.001, `${retryInMs} ms after ${said} ms were asked for`);
  const sent = self.send("self", "2");
  await hub.do("start");
  time.advance(said);
  assert.equal(recorder.sockets.length, 1);
  time.advance(time.next);
  assert.equal(recorder.sockets.length, 2);
  await sent;
  assert.deepEqual(await read(self, 2), ["1", "2"]);
});

test("a wrong token is refused, and not tried again", withHub, async () => {
  const hub = await ManualHub.open();
  await hub.register("self");
  const recorder = new Recorder();
  const losses: Disconnected[] = [];
  const options = { WebSocket: recorder.WebSocket, onDisconnected: (loss: Disconnected) => losses.push(loss) };
  const self = client(hub.url, "self", "hg_wrong", options);
  const queued = self.send("self", "1");
  const read = self[Symbol.asyncIterator]().next();
  const expected = { code: "unauthorized", detail: "the token doesn't belong to the address" };
  for (const promise of [self.ready, queued, read, self.send("self", "2"), self[Symbol.asyncIterator]().next()]) {
    const error = await rejection(promise);
    assert.ok(error instanceof RelayError);
    assert.deepEqual({ code: error.code, detail: error.detail }, expected);
    assert.equal(error.message, "unauthorized: the token doesn't belong to the address");
  }
  await until(() => recorder.socket.readyState === recorder.socket.CLOSED);
  assert.deepEqual([recorder.sockets.length, losses, await self.close()], [1, [], []]);
});

test("a token that is revoked ends everything, once the hub has said so", withHub, async () => {
  const hub = await ManualHub.open();
  const time = new ManualTime();
  const losses: Disconnected[] = [];
  const options = { runtime: time, onDisconnected: (loss: Disconnected) => losses.push(loss) };
  const self = client(hub.url, "self", await hub.register("self"), options);
  await self.ready;
  await hub.revoke("self");
  await until(() => losses.length === 1);
  assert.equal(at(losses, 0).code, 1008);
  const lost = rejection(self.send("self", "1"));
  time.advance(time.next);
  assert.equal(((await lost) as RelayError).code, "unauthorized");
  await until(() => time.next === Infinity); // the farewell is over, and nothing more is due
});

test("each pause before another connection is twice as long, up to half a minute, less some by chance", async () => {
  const server = await SmallServer.open(() => undefined);
  const { url } = server;
  await server.close(); // nobody listens there now
  for (const [chance, share] of [[0, 1], [0.999, 0.5005]] as const) {
    const pauses: number[] = [];
    const time = new ManualTime(() => chance);
    client(url, "self", "token", { runtime: time, onDisconnected: ({ retryInMs }) => pauses.push(retryInMs) });
    for (const number of numbers(9)) {
      await until(() => pauses.length === Number(number));
      time.advance(time.next);
    }
    const expected = [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000, 30_000];
    assert.deepEqual(pauses.map(Math.round), expected.map((pause) => Math.round(pause * share)));
  }
});

test("a connection that has held for a while makes the next pause short again", async () => {
  const pauses: number[] = [];
  const time = new ManualTime();
  const server = await SmallServer.open((caller, envelope) => caller.answer(envelope, welcome));
  const recorder = new Recorder(time);
  const { WebSocket } = recorder;
  const self = client(server.url, "self", "token", {
    WebSocket,
    runtime: time,
    onDisconnected: ({ retryInMs }) => pauses.push(retryInMs),
  });
  await self.ready;
  for (const [held, pause] of [[0, 500], [0, 1000], [30_000, 2000], [30_001, 500], [0, 1000]] as const) {
    const known = recorder.notes.length;
    time.advance(held);
    recorder.socket.terminate();
    await until(() => pauses.length > 0);
    assert.equal(pauses.pop(), pause);
    time.advance(pause);
    await until(() => recorder.notes.length === known + 2);
  }
});

test("a hub that falls silent is left, and what it had not answered is sent again under the same id", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    } else if (caller.number > 1) {
      caller.answer(envelope, ack);
    }
  });
  const losses: Disconnected[] = [];
  const time = new ManualTime();
  const self = client(server.url, "self", "token", {
    runtime: time,
    answerWithinMs: 3000,
    onDisconnected: (loss) => losses.push(loss),
  });
  const one = self.send("other", "1");
  await until(() => server.ids.length === 1);
  const two = self.send("other", "2");
  time.advance(2999);
  assert.equal(losses.length, 0);
  time.advance(1);
  await until(() => losses.length === 1);
  assert.deepEqual(at(losses, 0), { code: 4000, reason: "no answer within 3000 ms", retryInMs: 500 });
  time.advance(500);
  const [first, second] = [await one, await two];
  assert.deepEqual(server.ids, [first.id, first.id, second.id]);
  assert.equal(time.next, Infinity); // and nothing more is due
});

test("a hub that does not welcome anybody is left", async () => {
  const server = await SmallServer.open(() => undefined);
  const losses: Disconnected[] = [];
  const time = new ManualTime();
  client(server.url, "self", "token", { runtime: time, onDisconnected: (loss) => losses.push(loss) });
  await until(() => server.heard.length === 1);
  time.advance(30_000);
  await until(() => losses.length === 1);
  assert.equal(at(losses, 0).reason, "no WELCOME within 30000 ms");
});

test("what is no envelope is dropped, counted and logged now and then, and the connection goes on", async (t) => {
  const error = t.mock.method(console, "error", () => undefined);
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    } else {
      caller.socket.send("text");
      caller.socket.send(new Uint8Array([255, 255, 255]));
      caller.socket.send(new Uint8Array([10, 255]));
      caller.answer(envelope, ack);
    }
  });
  const self = client(server.url, "self", "token", { runtime: new ManualTime() });
  await self.send("other", "1");
  await self.send("other", "2");
  assert.deepEqual([self.unreadable, self.dropped, server.connections], [6, 0, 1]);
  const said = error.mock.calls.map((call) => String(call.arguments[0]));
  const what = "@headgate/relay: dropped a message of the hub that can't be read, of";
  const sizes = [[4, 1], [3, 2], [4, 4]];
  assert.deepEqual(said, sizes.map(([size, count]) => `${what} ${size} bytes or characters (${count} so far)`));
});

test("a hub that can not tell now, or denies a connection, is asked again later", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (caller.number === 1) {
      const value = { code: "unavailable", detail: "the store is away" };
      caller.answer(envelope, { type: MessageType.ERROR, payload: { case: "error", value } });
    } else if (caller.number === 2) {
      const value = { retryAfterMs: 7000n, reason: "too many failed attempts" };
      caller.answer(envelope, { type: MessageType.RATE_LIMITED, payload: { case: "rateLimited", value } });
    } else {
      caller.answer(envelope, welcome);
    }
  });
  const losses: Disconnected[] = [];
  const denials: RateLimited[] = [];
  const time = new ManualTime(() => 0.5);
  const self = client(server.url, "self", "token", {
    runtime: time,
    onDisconnected: (loss) => losses.push(loss),
    onRateLimited: (denial) => denials.push(denial),
  });
  await until(() => losses.length === 1);
  assert.equal(at(losses, 0).reason, "unavailable: the store is away");
  time.advance(time.next);
  await until(() => losses.length === 2);
  assert.deepEqual(denials, [{ waitMs: 7000, reason: "too many failed attempts", id: "" }]);
  assert.equal(at(losses, 1).retryInMs, 7350);
  time.advance(time.next);
  await self.ready;
});

test("what was given up is not sent again on the next connection", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    } else if (caller.number > 1) {
      caller.answer(envelope, ack);
    }
  });
  const recorder = new Recorder();
  const { WebSocket } = recorder;
  const time = new ManualTime();
  const self = client(server.url, "self", "token", { WebSocket, runtime: time, inFlight: 3 });
  await self.ready;
  const abort = new AbortController();
  const [one, two, three] = numbers(3).map((body) => {
    return self.send("other", body, body === "2" ? { signal: abort.signal } : {});
  });
  await until(() => server.ids.length === 3);
  abort.abort(new Error("enough"));
  assert.equal(((await rejection(two as Promise<unknown>)) as Error).message, "enough");
  recorder.socket.terminate();
  await until(() => self.inFlight === 0);
  time.advance(time.next);
  await Promise.all([one, three]);
  assert.deepEqual(recorder.bodies, ["1", "2", "3", "1", "3"]);
});
