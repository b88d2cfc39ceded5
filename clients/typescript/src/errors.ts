/**
 * Why something was not passed on, in one word: the codes of the hub (docs/relay.md), which may become more, and
 * `closed`, which says that this client was closed before the hub had answered.
 */
export type RelayErrorCode =
  | "unauthorized"
  | "invalid"
  | "too_large"
  | "unreachable"
  | "busy"
  | "unavailable"
  | "closed"
  | (string & {});

/** An envelope was not passed on, or a client was refused. */
export class RelayError extends Error {
  override readonly name = "RelayError";

  constructor(
    /** One word for programs. */
    readonly code: RelayErrorCode,
    /** A sentence for people. */
    readonly detail: string,
  ) {
    super(`${code}: ${detail}`);
  }
}
