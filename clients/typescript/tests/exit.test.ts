import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { type AddressInfo, createServer, type Socket } from "node:net";
import { afterEach, test } from "node:test";
import { fileURLToPath } from "node:url";

import { MessageType } from "../dist/gen/headgate/v1/envelope_pb.js";
import { closeServers, SmallServer, unauthorized, welcome } from "./server.js";

afterEach(closeServers);

const PATIENCE_MS = 60_000; // far more than it takes, far less than the client's own deadlines

/** Runs a program that uses a client, which must end by itself. */
async function ends(url: string, kind: string, moment: string): Promise<void> {
  const program = fileURLToPath(new URL("exiting.js", import.meta.url));
  const flags = process.execArgv.filter((flag) => flag.includes("websocket"));
  const child = spawn(process.execPath, [...flags, program, url, kind, moment]);
  let said = "";
  child.stderr.on("data", (data: Buffer) => (said += data.toString()));
  const timer = setTimeout(() => child.kill("SIGKILL"), PATIENCE_MS);
  const [code, signal] = (await once(child, "close")) as [number | null, string | null];
  clearTimeout(timer);
  assert.deepEqual([code, signal], [0, null], said);
}

for (const kind of ["ws", "built-in"]) {
  for (const moment of ["connected", "sending"]) {
    test(`${kind}: node exits after close(): ${moment}`, async () => {
      const server = await SmallServer.open((caller, envelope) => {
        if (envelope.type === MessageType.HELLO) {
          caller.answer(envelope, welcome);
        }
      });
      await ends(server.url, kind, moment);
    });

    test(`${kind}: node exits after close(): ${moment}, and the server never answers the close`, async () => {
      const server = await SmallServer.open((caller, envelope) => {
        caller.answer(envelope, welcome);
        caller.socket.pause(); // it reads nothing more
      });
      await ends(server.url, kind, moment);
    });
  }

  test(`${kind}: node exits after close() while it connects`, async () => {
    const sockets: Socket[] = [];
    const server = createServer((socket) => sockets.push(socket.on("error", () => undefined))).listen(0, "127.0.0.1");
    await once(server, "listening");
    await ends(`ws://127.0.0.1:${(server.address() as AddressInfo).port}/relay`, kind, "connecting");
    sockets.forEach((socket) => socket.destroy());
    server.close();
  });

  test(`${kind}: node exits after close() while it waits to reconnect`, async () => {
    await ends("ws://127.0.0.1:1/relay", kind, "waiting");
  });

  test(`${kind}: node exits after a refusal, also if the server never answers the close`, async () => {
    const server = await SmallServer.open((caller, envelope) => {
      caller.answer(envelope, unauthorized);
      caller.socket.pause();
    });
    await ends(server.url, kind, "refused");
  });
}
