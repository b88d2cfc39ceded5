export { type Message, type Receipt, RelayClient, type SendOptions, type Unsent } from "./client.js";
export { RelayError, type RelayErrorCode } from "./errors.js";
export type { Disconnected, RateLimited, RelayOptions } from "./options.js";
export type { RelaySocket, RelaySocketClass, Runtime } from "./runtime.js";
