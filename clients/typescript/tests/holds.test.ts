import assert from "node:assert/strict";
import { test } from "node:test";

import { type Costs, Hold, HoldClient, type HoldClientOptions, HoldError } from "@headgate/relay";

import { sum, written } from "../dist/decimal.js";
import { AccountHub, at, ManualTime, rejection, until, withHub } from "./support.js";

/** A time on which every pause is over at once. */
class SkippedTime extends ManualTime {
  readonly pauses: number[] = [];

  override after(milliseconds: number, call: () => void): () => void {
    if (milliseconds >= 10_000) {
      return () => undefined; // the time for an answer
    }
    this.pauses.push(milliseconds);
    this.advance(milliseconds);
    queueMicrotask(call);
    return () => undefined;
  }
}

type Fault = "request" | "answer" | number | "";

/** A fetch that loses requests or answers, as the script says. */
function lossy(script: Fault[], seen: string[] = []): typeof fetch {
  return async (url, init) => {
    seen.push(`${init?.method} ${String(url).split("/").at(-1)}`);
    const fault = script.shift() ?? "";
    if (fault === "request") {
      throw new TypeError("fetch failed", { cause: new Error("refused") });
    }
    if (typeof fault === "number") {
      const body = JSON.stringify({ error: "unavailable", detail: "away" });
      return new Response(body, { status: fault, headers: { "retry-after": "2" } });
    }
    const response = await fetch(url, init);
    if (fault === "answer") {
      await response.arrayBuffer();
      throw new TypeError("fetch failed", { cause: new Error("reset") });
    }
    return response;
  };
}

/** A client of a hub that always answers the same. */
function answered(status: number, body: string, options: Partial<HoldClientOptions> = {}): HoldClient {
  const fetch = (): Promise<Response> => Promise.resolve(new Response(body, { status }));
  return new HoldClient("http://hub.example/", { token: "t", fetch, runtime: new SkippedTime(), ...options });
}

async function refusal(promise: Promise<unknown>): Promise<HoldError> {
  const error = await rejection(promise);
  assert.ok(error instanceof HoldError, String(error));
  return error;
}

test("holds: decimals are exact", () => {
  assert.equal(sum("0.1", "0.2"), "0.3");
  assert.equal(sum("9007199254740993", "0.000001"), "9007199254740993.000001");
  assert.equal(written("x", 1e-7), "0.0000001");
  assert.equal(written("x", 1.25e-7), "0.000000125");
  assert.equal(written("x", 1e21), "1000000000000000000000");
  assert.equal(written("x", 12n), "12");
  for (const wrong of [-1, NaN, Infinity, "-1", "1e3", "", " 1", true, null, undefined, {}]) {
    assert.throws(() => written("cost of usd", wrong as number), /^TypeError: cost of usd: expected a number, 0 or more/);
  }
});

test("holds: a wrong address is refused", () => {
  for (const url of ["", "hub", "ws://hub", "http://", "http://a@b", "http://hub?x"]) {
    assert.throws(() => new HoldClient(url, { token: "t" }), /url: expected the address of a hub/);
  }
});

const answers: [number, string, string, string][] = [
  [400, '{"error": "invalid", "detail": "cost: no"}', "invalid", "cost: no"],
  [401, '{"error": "unauthorized", "detail": "who?"}', "unauthorized", "who?"],
  [404, '{"error": "unknown_hold", "detail": "no"}', "unknown_hold", "no"],
  [404, "<html>", "status_404", ""],
  [409, '{"error": "hold_error", "detail": "other costs"}', "hold_error", "other costs"],
  [200, "<html>", "unavailable", "expected the answer of a headgate hub"],
  [200, "[]", "unavailable", "expected the answer of a headgate hub"],
  [201, '{"id": "x"}', "unavailable", "expected the hold of a headgate hub"],
  [429, '["odd"]', "status_429", ""],
];
for (const [status, body, code, detail] of answers) {
  test(`holds: an answer of ${status} with ${body} is ${code}`, async () => {
    const error = await refusal(answered(status, body).hold({ usd: 1 }));
    assert.deepEqual([error.code, error.detail], [code, detail]);
  });
}

test("holds: a denial says what bound, and is not repeated", async () => {
  const bound = { account: "acme", resource: "usd", tool: "" };
  const body = JSON.stringify({ error: "rate_limited", detail: "no", retry_after_ms: 5000, ...bound });
  const error = await refusal(answered(429, body).hold({ usd: 1 }));
  assert.deepEqual([error.code, error.retryAfterMs, error.bound], ["rate_limited", 5000, bound]);
});

test("holds: a denial after which no wait helps says so, and is not repeated", async () => {
  const body = JSON.stringify({ error: "rate_limited", detail: "blocked", retry_after_ms: 60_000, no_wait_helps: true });
  const error = await refusal(answered(429, body).hold({ usd: 1 }));
  assert.deepEqual([error.code, error.detail, error.retryAfterMs], ["rate_limited", "blocked", undefined]);
});

test("holds: a hub that stays away is given up in time", async () => {
  const runtime = new SkippedTime();
  const seen: string[] = [];
  const fetch = lossy(Array<Fault>(1000).fill("request"), seen);
  const client = new HoldClient("http://hub.example", { token: "t", fetch, runtime });
  const error = await refusal(client.hold({ usd: 1 }));
  assert.deepEqual([error.code, error.detail], ["unavailable", "http://hub.example: fetch failed: refused"]);
  const total = runtime.pauses.reduce((one, other) => one + other, 0);
  assert.ok(total > 15_000 && total <= 30_000, String(total));
  assert.equal(seen.length, runtime.pauses.length + 1);
});

test("holds: a hub that never answers is given up in time", async () => {
  const runtime = new ManualTime();
  const fetch = (_: unknown, init?: RequestInit): Promise<Response> =>
    new Promise((_resolve, reject) => init?.signal?.addEventListener("abort", () => reject(init.signal?.reason)));
  const options = { token: "t", fetch: fetch as typeof globalThis.fetch, runtime, retryWithinMs: 0 };
  const holding = refusal(new HoldClient("http://hub.example", options).hold({ usd: 1 }));
  await until(() => runtime.next === 10_000);
  runtime.advance(10_000);
  assert.equal((await holding).detail, "http://hub.example: no answer within 10000 ms");
});

test("holds: a block is settled with what was used", withHub, async () => {
  const hub = await AccountHub.open();
  const client = new HoldClient(hub.url, { token: hub.token });
  const result = await client.run({ usd: "3" }, { session: "run-42" }, async (hold) => {
    assert.deepEqual([hold.state, hold.account, hold.costs["usd"]], ["open", "acme/-/planner", "3.000000"]);
    assert.equal(await hub.left(), "7.00 1");
    hold.use({ usd: 0.1 });
    hold.use({ usd: 0.2 });
    return "done";
  });
  assert.deepEqual([result, await hub.left()], ["done", "9.70 2"]);
  await client.run({ usd: 1 }, {}, async () => undefined);
  assert.equal(await hub.left(), "8.70 2");
  const { path, limits } = await client.account("acme");
  assert.deepEqual([path, at(limits, 0).spent, at(limits, 0).left], ["acme", "1.300000", "8.700000"]);
});

test("holds: the verbs", withHub, async () => {
  const hub = await AccountHub.open();
  const client = new HoldClient(hub.url, { token: hub.token });
  const hold = await client.hold({ usd: 1 }, { id: "one" });
  await hold.extend({ usd: "0.5" }, { leaseMs: 100_000 });
  assert.equal(hold.costs["usd"], "1.500000");
  const found = await client.find("one");
  await found.settle({ usd: "0.75" });
  assert.deepEqual([found.state, await hub.left()], ["settled", "9.25 2"]);
  assert.equal((await refusal(hold.settle({ usd: 1 }))).code, "hold_error");
  const other = await client.hold({ usd: 1 });
  await other.cancel();
  assert.deepEqual([other.state, await hub.left()], ["cancelled", "9.25 2"]);
  assert.equal((await refusal(client.find("none"))).code, "unknown_hold");
  const denied = await refusal(client.hold({ usd: "9.26" }));
  assert.deepEqual(denied.bound, { account: "acme", resource: "usd", tool: "" });
  await assert.rejects(client.hold({ usd: -1 }), TypeError);
  await assert.rejects(client.hold(5 as unknown as Costs), /costs: expected costs by resource/);
  assert.equal(await hub.left(), "9.25 2");
});

test("holds: a block that throws keeps the cost and frees the slot", withHub, async () => {
  const hub = await AccountHub.open();
  const client = new HoldClient(hub.url, { token: hub.token });
  for (const [used, left] of [["0", "9.00 2"], ["1.5", "7.50 2"]] as const) {
    const failing = client.run({ usd: 1 }, {}, async (hold) => {
      hold.use({ usd: used });
      throw new RangeError("of the block");
    });
    await assert.rejects(failing, RangeError);
    assert.equal(await hub.left(), left);
  }
});

for (const fault of ["request", "answer", 503, 502] as const) {
  test(`holds: a lost request is repeated and charged once: ${fault}`, withHub, async () => {
    const hub = await AccountHub.open();
    const script: Fault[] = [fault, fault, ""];
    const seen: string[] = [];
    const runtime = new SkippedTime();
    const client = new HoldClient(hub.url, { token: hub.token, fetch: lossy(script, seen), runtime });
    const hold = await client.hold({ usd: 1 });
    assert.equal(await hub.left(), "9.00 1");
    script.push(fault, "");
    await hold.extend({ usd: 1 });
    assert.equal(await hub.left(), "8.00 1");
    script.push(fault, "");
    await hold.settle({ usd: "0.5" });
    assert.equal(await hub.left(), "9.50 2");
    assert.deepEqual(seen.length, 7);
    assert.ok(runtime.pauses.every((pause) => pause >= (typeof fault === "number" ? 2000 : 250)));
  });
}

test("holds: the lease is renewed while the block runs, and not beyond the greatest age", withHub, async () => {
  const hub = await AccountHub.open();
  const runtime = new ManualTime();
  const client = new HoldClient(hub.url, { token: hub.token, runtime });
  const options = { leaseMs: 60_000, maxAgeMs: 100_000 };
  let block: Hold | undefined;
  await client.run({ usd: 1 }, options, async (hold) => {
    block = hold;
    for (let renewed = 1; renewed <= 4; renewed++) {
      await until(() => runtime.next === 20_000); // nothing but the pause of the renewal
      await hub.advance(20_000);
      runtime.advance(20_000);
      await until(() => runtime.next === 20_000);
      assert.equal((await client.find(hold.id)).state, "open");
    }
    await hub.advance(20_000);
    runtime.advance(20_000); // the greatest age
    await hub.advance(60_000);
    assert.equal((await client.find(hold.id)).state, "expired");
  });
  assert.deepEqual([block?.state, await hub.left()], ["settled", "9.00 2"]);
});
