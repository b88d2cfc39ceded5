import type { Settings } from "./options.js";

const FIRST_MS = 500;
const LONGEST_MS = 30_000;
const LONGEST_TOLD_MS = 86_400_000;
const MOST_JITTER_MS = 10_000;

/**
 * How long to wait after so many failures in a row: half a second, and twice as long each time, up to half a minute, less
 * up to a half at random. From the third on that is at least a second.
 */
export function backoff(failures: number, random: () => number): number {
  return Math.min(FIRST_MS * 2 ** (failures - 1), LONGEST_MS) * (1 - random() / 2);
}

/** A wait that the hub asks for, within bounds: from a millisecond to a day. */
export function toldWait(milliseconds: number): number {
  return Math.min(Math.max(1, milliseconds), LONGEST_TOLD_MS);
}

/** What is added to a wait at random, so that not all clients come back at the same moment. */
export function jitter(waitMs: number, { jitter: share, random }: Pick<Settings, "jitter" | "random">): number {
  return Math.min(waitMs * share, MOST_JITTER_MS) * random();
}
