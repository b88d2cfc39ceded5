/** A program that uses a client and closes it, at a moment of the test's choice. It must end by itself. */
import { once } from "node:events";

import { RelayClient } from "@headgate/relay";
import { WebSocket } from "ws";

const [url, kind, moment] = process.argv.slice(2) as [string, string, string];
const lost = new EventTarget();
const client = new RelayClient(url, {
  ...(kind === "ws" ? { WebSocket } : {}),
  address: "self",
  token: "token",
  answerWithinMs: 600_000,
  onDisconnected: () => lost.dispatchEvent(new Event("lost")),
});
client.ready.catch(() => undefined);
if (moment === "waiting") {
  await once(lost, "lost");
} else if (moment === "refused") {
  await client.ready.catch(() => undefined); // and is never closed
} else if (moment !== "connecting") {
  await client.ready;
}
if (moment === "sending") {
  client.send("other", "1").catch(() => undefined);
  void client.close({ withinMs: 600_000 });
}
if (moment !== "refused") {
  await Promise.all([client.close({ withinMs: 10 }), client.close({ withinMs: 10 })]);
  await client.close();
}
