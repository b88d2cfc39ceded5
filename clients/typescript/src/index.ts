export { type Message, type Receipt, RelayClient, type SendOptions, type Unsent } from "./client.js";
export type { Amount, Costs } from "./decimal.js";
export { RelayError, type RelayErrorCode } from "./errors.js";
export {
  type AccountStatus,
  type Bound,
  Hold,
  HoldClient,
  type HoldClientOptions,
  HoldError,
  type HoldOptions,
} from "./holds.js";
export type { Disconnected, RateLimited, RelayOptions } from "./options.js";
export type { RelaySocket, RelaySocketClass, Runtime } from "./runtime.js";
