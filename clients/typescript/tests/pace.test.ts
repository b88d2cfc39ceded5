import assert from "node:assert/strict";
import { test } from "node:test";

import { Pace } from "../dist/pace.js";

test("at first nothing is known, and nothing held back", () => {
  const pace = new Pace();
  pace.passed(0);
  assert.deepEqual([pace.free, pace.wait(0)], [true, 0]);
});

test("two denials, with so many between that passed, say how far apart envelopes may be", () => {
  const pace = new Pace();
  pace.denied(0, 100, 7);
  assert.deepEqual([pace.free, pace.wait(0), pace.wait(106), pace.wait(107)], [false, 107, 1, 0]);
  pace.passed(110);
  assert.equal(pace.wait(110), 0); // how long the next would take isn't known yet
  pace.passed(111);
  pace.denied(112, 188, 0); // 300 - 100 for two
  assert.equal(pace.wait(112), 188);
  pace.passed(305);
  assert.equal(pace.wait(305), 100);
});

test("a denial never shortens a wait", () => {
  const pace = new Pace();
  pace.denied(0, 1000, 0);
  pace.denied(1, 10, 0);
  assert.equal(pace.wait(0), 1000);
});

test("what was learned is tried again after so many", () => {
  const pace = new Pace();
  pace.denied(0, 10, 0);
  pace.passed(10);
  pace.denied(10, 10, 0);
  for (let number = 2; number < 51; number += 1) {
    pace.passed(number * 10);
    assert.deepEqual([pace.free, pace.wait(number * 10)], [false, 10]);
  }
  pace.passed(510);
  assert.deepEqual([pace.free, pace.wait(510)], [true, 0]);
  pace.denied(510, 20, 0); // 530 - 20 for 50: it was a little slower
  pace.passed(530);
  assert.equal(Math.round(pace.wait(530) * 100), 1020);
});

test("time in which there was nothing to send tells nothing of the limit", () => {
  const pace = new Pace();
  pace.denied(0, 10, 0);
  pace.idle(10, 10_000);
  assert.equal(pace.free, true);
  pace.passed(10_000);
  pace.denied(10_000, 10, 0);
  pace.passed(10_010);
  assert.equal(pace.wait(10_010), 0); // not ten thousand
  pace.denied(10_010, 10, 0);
  pace.passed(10_020);
  assert.equal(pace.wait(10_020), 10);
  pace.idle(10_020, 10_035); // of which it was held back for 10
  assert.equal(pace.free, false);
  pace.idle(10_036, 10_046);
  assert.equal(pace.free, true);
  pace.denied(10_046, 10, 0);
  pace.passed(10_056);
  assert.equal(pace.wait(10_056), 10); // still what was learned
});
