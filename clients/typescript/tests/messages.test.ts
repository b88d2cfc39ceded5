import assert from "node:assert/strict";
import { afterEach, test } from "node:test";

import { toBinary } from "@bufbuild/protobuf";
import { type Message, RelayClient, RelayError, type RelayOptions } from "@headgate/relay";
import { WebSocket } from "ws";

import { EnvelopeSchema, MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";
import { at, client, closeAll, numbers, read, withHub, rejection, ManualHub, ManualTime, text, until } from "./support.js";
import { ack, closeServers, SmallServer, welcome } from "./server.js";

afterEach(closeAll);
afterEach(closeServers);

test("a message has its sender, its body, what that is, and what it answers", withHub, async () => {
  const hub = await ManualHub.open();
  const ada = client(hub.url, "ada", await hub.register("ada"));
  const bob = client(hub.url, "bob", await hub.register("bob"));
  await bob.ready;
  const { id } = await ada.send("bob", new Uint8Array([0, 255]), { contentType: "application/x-thing" });
  for await (const message of bob) {
    const body = new Uint8Array([0, 255]);
    assert.deepEqual(message, { id, from: "ada", inReplyTo: "", body, contentType: "application/x-thing" });
    await bob.send(message.from, "thanks", { inReplyTo: message.id });
    break;
  }
  const { value } = await ada[Symbol.asyncIterator]().next();
  assert.ok(value !== undefined);
  assert.deepEqual([value.from, text(value.body), value.inReplyTo], ["bob", "thanks", id]);
});

test("text and bytes say what they are", withHub, async () => {
  const hub = await ManualHub.open();
  const found: Message[] = [];
  const self = client(hub.url, "self", await hub.register("self"), { onMessage: (message) => found.push(message) });
  await self.send("self", "grüße");
  await self.send("self", new Uint8Array([1]));
  await self.send("self", "");
  await until(() => found.length === 3);
  const kinds = found.map(({ contentType }) => contentType);
  assert.deepEqual(kinds, ["text/plain", "application/octet-stream", "text/plain"]);
  assert.equal(text(at(found, 0).body), "grüße");
  assert.throws(() => self[Symbol.asyncIterator](), /expected no onMessage/);
});

test("an inbox that nobody reads is bounded: what comes then is dropped and reported", withHub, async () => {
  const hub = await ManualHub.open();
  const dropped: string[] = [];
  const onDropped = ({ body }: Message): number => dropped.push(text(body));
  const self = client(hub.url, "self", await hub.register("self"), { inbox: 2, onDropped });
  await Promise.all(numbers(5).map((body) => self.send("self", body)));
  await until(() => self.dropped === 3);
  assert.deepEqual(dropped, ["3", "4", "5"]);
  assert.deepEqual(await read(self, 2), ["1", "2"]);
  const next = read(self, 1);
  await self.send("self", "6");
  assert.deepEqual(await next, ["6"]);
});

test("what is not passed on is rejected with the hub's word for it, and the next passes", withHub, async () => {
  const hub = await ManualHub.open();
  const self = client(hub.url, "self", await hub.register("self"));
  const code = async (to: string, size: number): Promise<string> => {
    const error = await rejection(self.send(to, new Uint8Array(size)));
    assert.ok(error instanceof RelayError);
    return error.code;
  };
  assert.equal(await code("nobody", 1), "unreachable");
  assert.equal(await code("self", 65_536), "too_large"); // the hub can't say which: it reads none so large
  assert.equal(await code("self", 65_537), "too_large");
  assert.equal((await hub.counted()).passed, 2); // the last was not even sent
  await self.send("self", "1");
  assert.deepEqual(await read(self, 1), ["1"]);
});

test("what is so large that the hub ends the connection is rejected, and the rest goes on", withHub, async () => {
  const hub = await ManualHub.open();
  const self = client(hub.url, "self", await hub.register("self"), { inFlight: 3, largest: 400_000 });
  await self.ready;
  const [one, large, two] = ["1", new Uint8Array(300_000), "2"].map((body) => self.send("self", body));
  const error = await rejection(large as Promise<unknown>);
  assert.ok(error instanceof RelayError);
  assert.equal(error.code, "too_large");
  await Promise.all([one, two]);
});

for (const [where, options, largest] of [
  ["body", {}, 200_000],
  ["content type", { contentType: "x".repeat(65_000), inReplyTo: "y".repeat(65_000) }, 65_536],
] as const) {
  test(`what is large in its ${where} and costs three connections is rejected, whatever ended them`, async () => {
    const server = await SmallServer.open((caller, envelope) => {
      if (envelope.type === MessageType.HELLO) {
        caller.answer(envelope, welcome);
      } else if (toBinary(EnvelopeSchema, envelope).length > 100_000) {
        caller.socket.terminate();
      } else {
        caller.answer(envelope, ack);
      }
    });
    const time = new ManualTime();
    let losses = 0;
    const self = client(server.url, "self", "token", { runtime: time, largest, onDisconnected: () => (losses += 1) });
    const large = rejection(self.send("other", new Uint8Array(where === "body" ? 150_000 : 1), options));
    const small = self.send("other", "1");
    for (const count of [1, 2, 3]) {
      await until(() => losses === count);
      time.advance(time.next);
    }
    assert.match(((await large) as Error).message, /^too_large: the connection was lost 3 times over 1[35]00\d\d bytes$/);
    await small;
    assert.equal(server.ids.length, 4);
  });
}

test("texts of an envelope are no larger than its body may be", async () => {
  const self = client("ws://127.0.0.1:1/relay", "self", "token", { largest: 100 });
  const long = "x".repeat(101);
  for (const [to, options] of [[long, {}], ["other", { contentType: long }], ["other", { inReplyTo: long }]] as const) {
    const error = await rejection(self.send(to, "body", options));
    assert.equal((error as Error).message, "too_large: expected at most 100 bytes, got 101");
  }
});

test("options that can't be used are refused with a sentence", () => {
  const good = { address: "self", token: "token", WebSocket };
  const refused = (url: unknown, options: object): string => {
    try {
      new RelayClient(url as string, { ...good, ...options } as RelayOptions);
    } catch (error) {
      assert.ok(error instanceof TypeError);
      return error.message;
    }
    return assert.fail("expected it to be refused");
  };
  const address = 'expected the address of a relay such as "ws://127.0.0.1:8080/relay", got';
  assert.equal(refused("http://host/relay", {}), `${address} "http://host/relay"`);
  assert.equal(refused("host", {}), `${address} "host"`);
  assert.equal(refused("ws://host/relay#x", {}), `${address} "ws://host/relay#x"`);
  assert.equal(refused(undefined, {}), `${address} undefined`);
  assert.equal(refused("ws://host", { address: "" }), "expected `address`, the agent's id, got an empty text");
  const token = "expected `token`, what the agent got when it was registered, got undefined";
  assert.equal(refused("ws://host", { token: undefined }), token);
  assert.equal(refused("ws://host", { most: 0 }), "expected `most` to be a whole number from 1 on, got 0");
  assert.equal(refused("ws://host", { inFlight: 1.5 }), "expected `inFlight` to be a whole number from 1 on, got 1.5");
  assert.equal(refused("ws://host", { inbox: NaN }), "expected `inbox` to be a whole number from 1 on, got NaN");
  assert.equal(refused("ws://host", { jitter: -1 }), "expected `jitter` to be a number from 0 on, got -1");
});

test("a runtime without WebSockets of its own says what to do", () => {
  const own = Object.getOwnPropertyDescriptor(globalThis, "WebSocket");
  Reflect.deleteProperty(globalThis, "WebSocket");
  try {
    assert.throws(() => new RelayClient("ws://host/relay", { address: "self", token: "token" }), /npm install ws/);
  } finally {
    if (own !== undefined) {
      Object.defineProperty(globalThis, "WebSocket", own);
    }
  }
});

test("a runtime's own WebSocket is taken where there is one", withHub, async () => {
  const hub = await ManualHub.open();
  const token = await hub.register("self");
  const own = Object.getOwnPropertyDescriptor(globalThis, "WebSocket");
  Object.defineProperty(globalThis, "WebSocket", { value: WebSocket, configurable: true });
  try {
    const self = new RelayClient(hub.url, { address: "self", token });
    await self.send("self", "1");
    await self.close();
  } finally {
    Reflect.deleteProperty(globalThis, "WebSocket");
    if (own !== undefined) {
      Object.defineProperty(globalThis, "WebSocket", own);
    }
  }
});

test("another class in place of Node's own WebSocket is taken as it is", async () => {
  const urls: unknown[][] = [];
  class Polyfill extends EventTarget {
    binaryType = "";
    constructor(...given: unknown[]) {
      super();
      if (given.length > 1) {
        throw new SyntaxError("expected a protocol, got [object Object]");
      }
      urls.push(given);
    }

    close(): void {
      this.dispatchEvent(Object.assign(new Event("close"), { code: 1000, reason: "" }));
    }
  }
  void fetch("data:,"); // from then on Node has a dispatcher
  const own = Object.getOwnPropertyDescriptor(globalThis, "WebSocket");
  Object.defineProperty(globalThis, "WebSocket", { value: Polyfill, configurable: true });
  try {
    const self = new RelayClient("ws://host/relay", { address: "self", token: "token" });
    await self.close();
    assert.deepEqual(urls, [["ws://host/relay"]]);
  } finally {
    Reflect.deleteProperty(globalThis, "WebSocket");
    if (own !== undefined) {
      Object.defineProperty(globalThis, "WebSocket", own);
    }
  }
});

test("what can't be sent is refused with a sentence", async () => {
  const self = client("ws://127.0.0.1:1/relay", "self", "token");
  const refused = async (to: unknown, body: unknown): Promise<string> => {
    const error = await rejection(self.send(to as string, body as string));
    assert.ok(error instanceof TypeError);
    return error.message;
  };
  assert.equal(await refused("", "body"), "expected `to`, the address of another agent");
  assert.equal(await refused(undefined, "body"), "expected `to`, the address of another agent");
  const expected = "expected a body of text or bytes, a string or a Uint8Array, got";
  assert.equal(await refused("other", { some: "thing" }), `${expected} object`);
  assert.equal(await refused("other", undefined), `${expected} undefined`);
  const unlike = { contentType: 5 } as object;
  const error = await rejection(self.send("other", "body", unlike));
  assert.equal((error as Error).message, "expected `contentType` and `inReplyTo` to be text");
});
