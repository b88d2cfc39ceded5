/** Errors that nobody foresaw: each is a lost connection, and never the end of the client. */
import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { afterEach, test } from "node:test";

import type { Disconnected, RelayError, RelaySocketClass } from "@headgate/relay";
import { WebSocket } from "ws";

import { MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";
import { at, client, closeAll, closeNow, ManualTime, numbers, rejection, text, until, usedHeap } from "./support.js";
import { ack, closeServers, SmallServer, unauthorized, welcome } from "./server.js";

afterEach(closeAll);
afterEach(closeServers);

/** A server that acknowledges everything. */
function good(): Promise<SmallServer> {
  return SmallServer.open((caller, envelope) => {
    caller.answer(envelope, envelope.type === MessageType.HELLO ? welcome : ack);
  });
}

/** A client whose losses are followed at once by another attempt. */
function tireless(url: string, SocketClass: RelaySocketClass): { self: ReturnType<typeof client>; losses: Disconnected[] } {
  const time = new ManualTime();
  const losses: Disconnected[] = [];
  const self = client(url, "self", "token", {
    WebSocket: SocketClass,
    runtime: time,
    onDisconnected: (loss) => {
      losses.push(loss);
      time.advance(loss.retryInMs);
    },
  });
  return { self, losses };
}

test("a WebSocket whose constructor throws, at first and later, is a lost connection", async () => {
  const server = await good();
  const sockets: WebSocket[] = [];
  let attempts = 0;
  class Throwing extends WebSocket {
    constructor(url: string) {
      attempts += 1;
      if ([1, 2, 4].includes(attempts)) {
        throw new Error("too many sockets");
      }
      super(url);
      sockets.push(this);
    }
  }
  const { self, losses } = tireless(server.url, Throwing);
  await self.send("other", "1");
  at(sockets, 0).terminate();
  await self.send("other", "2");
  const reasons = losses.map(({ code, reason }) => [code, reason]);
  const thrown = [1006, "Error: too many sockets"];
  assert.deepEqual(reasons, [thrown, thrown, [1006, ""], thrown]);
});

test("a send that throws, of HELLO or of a message, is a lost connection, and the message is sent again", async () => {
  const server = await good();
  let sends = 0;
  class Throwing extends WebSocket {
    override send(data: Uint8Array): void {
      sends += 1;
      if ([1, 3, 5].includes(sends)) {
        throw new TypeError("the socket is gone");
      }
      super.send(data);
    }
  }
  const { self, losses } = tireless(server.url, Throwing);
  await Promise.all(numbers(3).map((body) => self.send("other", body)));
  assert.deepEqual(losses.map(({ reason }) => reason), Array.from({ length: 3 }, () => "TypeError: the socket is gone"));
  const bodies = server.heard.flatMap(({ payload }) => (payload.case === "data" ? [text(payload.value.body)] : []));
  assert.deepEqual(bodies, numbers(3));
});

test("a socket that can't even be ended is left to itself", async () => {
  const server = await good();
  const sockets: WebSocket[] = [];
  class Stubborn extends WebSocket {
    constructor(url: string) {
      super(url);
      sockets.push(this);
    }

    override send(data: Uint8Array): void {
      if (sockets.length === 1) {
        throw new Error("broken");
      }
      super.send(data);
    }

    override terminate(): void {
      throw new Error("broken too");
    }
  }
  const { self, losses } = tireless(server.url, Stubborn);
  await self.send("other", "1");
  assert.equal(losses.length, 1);
  await self.close();
  WebSocket.prototype.terminate.call(at(sockets, 0));
});

test("a WebSocket that fails each time it is closed, and at once, is closed only once", async () => {
  const server = await good();
  let attempts = 0;
  let closes = 0;
  class Hasty extends WebSocket {
    constructor(url: string) {
      super(url);
      attempts += 1;
    }

    override close(): void {
      closes += 1;
      super.terminate();
      this.emit("error", new Error("again"));
      this.emit("close", 1006, Buffer.alloc(0));
    }
  }
  const time = new ManualTime();
  const self = client(server.url, "self", "token", { WebSocket: Hasty, runtime: time });
  await self.close();
  await self.close();
  assert.deepEqual([attempts, closes, time.next], [1, 1, Infinity]);
});

test("messages that are no bytes, whatever the WebSocket makes of them, are counted", async (t) => {
  t.mock.method(console, "error", () => undefined);
  const server = await SmallServer.open((caller, envelope) => {
    caller.answer(envelope, envelope.type === MessageType.HELLO ? welcome : ack);
    for (const odd of numbers(4)) {
      caller.socket.send(odd);
    }
  });
  const odd: unknown[] = [new Blob(["x"]), null, 7, { byteLength: 3 }];
  class Odd extends WebSocket {
    override addEventListener(type: string, listener: never): void {
      const hear = listener as unknown as (event: { data: unknown }) => void;
      super.addEventListener(type as "message", ((event: { data: unknown }) => {
        hear(typeof event.data === "string" ? { data: odd[Number(event.data) - 1] } : event);
      }) as never);
    }
  }
  const { self } = tireless(server.url, Odd);
  await self.ready;
  await until(() => self.unreadable === 4);
  await self.send("other", "1");
});

test("listeners that throw, at once or later, are logged and harm nobody", async (t) => {
  const error = t.mock.method(console, "error", () => undefined);
  const server = await SmallServer.open((caller, envelope) => {
    if (caller.number === 1) {
      caller.socket.terminate();
    } else if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
      caller.answer(envelope, { type: MessageType.DATA, payload: { case: "data", value: {} } });
    } else {
      caller.answer(envelope, ack);
    }
  });
  const time = new ManualTime();
  const self = client(server.url, "self", "token", {
    runtime: time,
    onDisconnected: () => {
      throw new Error("at once");
    },
    onMessage: (async () => Promise.reject(new Error("later"))) as () => void,
  });
  await until(() => error.mock.callCount() === 1);
  time.advance(time.next);
  await self.send("other", "1");
  await until(() => error.mock.callCount() === 2);
  assert.deepEqual(
    error.mock.calls.map(({ arguments: [what, why] }) => [what, String(why)]),
    ["at once", "later"].map((why) => ["@headgate/relay: a listener has failed:", `Error: ${why}`]),
  );
});

test("calls after the end leave nothing behind", async () => {
  const server = await SmallServer.open((caller, envelope) => caller.answer(envelope, unauthorized));
  const self = client(server.url, "self", "token");
  await rejection(self.ready);
  const { signal } = new AbortController();
  const fail = async (count: number): Promise<RelayError> => {
    for (const body of numbers(count)) {
      await rejection(self.send("other", body, { signal }));
    }
    return (await rejection(self.send("other", "last", { signal }))) as RelayError;
  };
  const { stack = "" } = await fail(1000);
  const before = usedHeap();
  const error = await fail(20_000);
  assert.ok(usedHeap() - before < 2 ** 20, `${usedHeap() - before} bytes more`);
  assert.equal(error.stack?.length, stack.length);
  assert.equal(getEventListeners(signal, "abort").length, 0);
});

test("a hundred losses with a message in flight leave nothing behind", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    } else if (caller.number < 200) {
      caller.socket.terminate();
    } else {
      caller.answer(envelope, ack);
    }
  });
  const { self, losses } = tireless(server.url, WebSocket);
  const { signal } = new AbortController();
  const sent = self.send("other", "1", { signal });
  await until(() => losses.length >= 100);
  const before = usedHeap();
  await sent;
  assert.equal(losses.length, 199);
  assert.ok(usedHeap() - before < 2 ** 20, `${usedHeap() - before} bytes more`);
  assert.equal(getEventListeners(signal, "abort").length, 0);
});

test("a hub that never answers one envelope is left, however much else it says", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    } else if (caller.number > 1 || server.ids.length > 1) {
      caller.answer(envelope, ack);
    }
  });
  const time = new ManualTime();
  const losses: Disconnected[] = [];
  const self = client(server.url, "self", "token", {
    runtime: time,
    inFlight: 2,
    answerWithinMs: 1000,
    onDisconnected: (loss) => losses.push(loss),
  });
  const first = self.send("other", "first");
  await until(() => server.ids.length === 1);
  for (const body of numbers(10)) {
    await self.send("other", body);
    time.advance(99);
  }
  assert.equal(losses.length, 0);
  time.advance(10);
  await until(() => losses.length === 1);
  assert.equal(at(losses, 0).reason, "no answer within 1000 ms");
  time.advance(time.next);
  await first;
});

test("a second close that waits for less ends the first", async () => {
  const server = await SmallServer.open((caller, envelope) => {
    if (envelope.type === MessageType.HELLO) {
      caller.answer(envelope, welcome);
    }
  });
  const time = new ManualTime();
  const self = client(server.url, "self", "token", { runtime: time });
  const sent = rejection(self.send("other", "1"));
  await until(() => self.inFlight === 1);
  const closed = self.close({ withinMs: 60_000 });
  assert.equal(self.close({ withinMs: 100_000 }), closed);
  assert.equal(time.next, 30_000); // the answer's deadline, before the close's
  assert.equal(self.close({ withinMs: 500 }), closed);
  time.advance(499);
  assert.equal(self.queued, 1);
  time.advance(1);
  assert.deepEqual((await closed).map(({ body, mayHaveArrived }) => [text(body), mayHaveArrived]), [["1", true]]);
  assert.equal(((await sent) as RelayError).code, "closed");
  assert.deepEqual([await closeNow(self, time), time.next], [await closed, Infinity]);
});

test("the reason of a denial can't control the terminal, nor fill it", async (t) => {
  const warn = t.mock.method(console, "warn", () => undefined);
  const reason = "\u001b[2J\u009b31m\u202e\n" + "x".repeat(1_000_000);
  const server = await SmallServer.open((caller, envelope) => {
    const denial = { type: MessageType.RATE_LIMITED, payload: { case: "rateLimited", value: { reason } } } as const;
    caller.answer(envelope, envelope.type === MessageType.HELLO ? welcome : denial);
  });
  const self = client(server.url, "self", "token", { runtime: new ManualTime() });
  void rejection(self.send("other", "1"));
  await until(() => warn.mock.callCount() === 1);
  const expected = `\ufffd[2J\ufffd31m\ufffd\ufffd${"x".repeat(190)}`;
  assert.deepEqual(warn.mock.calls[0]?.arguments, [`@headgate/relay: rate limited, waiting 1 ms: ${expected}`]);
});

test("a welcome that comes after the close doesn't let the hub keep the connection open", async () => {
  const server = await SmallServer.open(() => undefined);
  const time = new ManualTime();
  const sockets: WebSocket[] = [];
  class Deaf extends WebSocket {
    constructor(url: string) {
      super(url);
      sockets.push(this);
    }

    override close(): void {
      // The other side never answers it.
    }
  }
  const self = client(server.url, "self", "token", { WebSocket: Deaf, runtime: time });
  await until(() => server.heard.length === 1);
  const closed = self.close();
  server.say(welcome);
  await new Promise((resolve) => at(sockets, 0).once("message", resolve));
  assert.equal(time.next, 1000);
  time.advance(1000);
  assert.deepEqual(await closed, []);
});

test("an address that can't be parsed is refused, and not tried for ever", () => {
  assert.throws(() => client("ws://[::1/relay", "self", "token"), /^TypeError: expected the address of a relay/);
  assert.throws(() => client("ws://host:99999/relay", "self", "token"), /^TypeError: expected the address of a relay/);
});
