import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdtempSync, readdirSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { fromBinary } from "@bufbuild/protobuf";

import { EnvelopeSchema, MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";

test("d5: the generated code is that of the schema", () => {
  const folder = mkdtempSync(join(tmpdir(), "headgate-"));
  try {
    execFileSync("npm", ["run", "--silent", "generate", "--", "--output", folder]);
    const files = (place: string): string[] => {
      const found = readdirSync(place, { recursive: true, withFileTypes: true }).filter((entry) => entry.isFile());
      return found.map(({ name }) => name).sort();
    };
    assert.deepEqual(files(join(folder, "src/gen")), files("src/gen"));
    const file = "src/gen/headgate/v1/envelope_pb.ts";
    assert.equal(readFileSync(file, "utf8"), readFileSync(join(folder, file), "utf8"), "run `npm run generate`");
  } finally {
    rmSync(folder, { recursive: true });
  }
});

test("d3: a denial on the wire, as other languages write it", () => {
  const bytes = Buffer.from("100f2a03612d31c2010908e807120477616974", "hex");
  const { type, inReplyTo, payload } = fromBinary(EnvelopeSchema, new Uint8Array(bytes));
  assert.deepEqual([type, inReplyTo, payload.case], [MessageType.RATE_LIMITED, "a-1", "rateLimited"]);
  assert.ok(payload.case === "rateLimited");
  assert.deepEqual([payload.value.retryAfterMs, payload.value.reason], [1000n, "wait"]);
});
