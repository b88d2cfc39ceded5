/**
 * A client of a hub's decision service for holds: reserve what a call may cost, and settle what it has cost.
 *
 * The client makes the id of each hold, so that a request whose answer was lost can be repeated.
 */
import { backoff, toldWait } from "./backoff.js";
import { type Costs, isLess, sum, writtenCosts } from "./decimal.js";
import { type Runtime, systemRuntime } from "./runtime.js";

const AGAIN = [408, 425, 502, 503, 504];
const LONGEST_DETAIL = 1000;

/** What decided on a hold. */
export interface Bound {
  readonly account: string;
  readonly resource: string;
  readonly tool: string;
}

/**
 * Why a hold isn't there, in one word: `rate_limited`, `unknown_hold`, `hold_error` (it has ended, or has other costs),
 * `unavailable` (the hub couldn't be reached, or couldn't decide, for as long as the client tries), or another code of
 * the hub, such as `invalid`.
 */
export class HoldError extends Error {
  override readonly name = "HoldError";

  constructor(
    readonly code: string,
    readonly detail: string,
    /** Of a denial: when to try again; undefined if no wait would help. */
    readonly retryAfterMs?: number,
    /** Of a denial: what decided. Without it, the program itself makes too many requests. */
    readonly bound?: Bound,
  ) {
    super(`${code}: ${detail}`);
  }
}

export interface HoldClientOptions {
  /** The token of an agent, or of an admin. */
  readonly token: string;
  /** For admins: the agent that holds. */
  readonly agent?: string;
  /** How long a request is repeated that got no answer, or that the hub can't decide: 30000. */
  readonly retryWithinMs?: number;
  /** How long one answer may take: 10000, and the timeout of a hold. */
  readonly answerWithinMs?: number;
  readonly fetch?: typeof globalThis.fetch;
  readonly runtime?: Runtime;
}

export interface HoldOptions {
  readonly session?: string | number;
  readonly tool?: string;
  /** How long it is held unless it is renewed: 60000. */
  readonly leaseMs?: number;
  /** How long the hub lets it wait if it is denied, up to 30000. */
  readonly timeoutMs?: number;
  /** The same id is the same hold. */
  readonly id?: string;
  /** A block renews its lease for so long: 3600000. */
  readonly maxAgeMs?: number;
}

/** An account, with its limits. Amounts are decimals. */
export interface AccountStatus {
  readonly path: string;
  readonly level: string;
  readonly plan: string;
  readonly limits: readonly {
    readonly resource: string;
    readonly tool: string;
    readonly limit: string;
    readonly amount: string;
    readonly spent: string;
    readonly held: string;
    readonly left: string;
    readonly resets_after: number | null;
  }[];
}

interface HoldAnswer {
  readonly id: string;
  readonly state: string;
  readonly account: string;
  readonly costs: Readonly<Record<string, string>>;
  readonly lease_left: number;
  readonly bound: Bound | null;
}

/** Ends the pauses of a renewal. */
class Stop {
  stopped = false;
  #wake = (): void => undefined;

  async pause(runtime: Runtime, milliseconds: number): Promise<void> {
    if (!this.stopped) {
      await new Promise<void>((resolve) => {
        const cancel = runtime.after(milliseconds, resolve);
        this.#wake = () => (cancel(), resolve());
      });
    }
  }

  stop(): void {
    this.stopped = true;
    this.#wake();
  }
}

/** What an agent has reserved on all accounts above it, until it is settled or cancelled, or its lease ends. */
export class Hold {
  #answer: HoldAnswer;
  #used: Record<string, string> = {};
  #lost = false;
  #endsAt: number;
  readonly #began: number;

  /** Made by `HoldClient`. */
  constructor(
    private readonly client: HoldClient,
    answer: HoldAnswer,
    private readonly leaseMs: number,
    private readonly maxAgeMs: number,
  ) {
    this.#answer = answer;
    this.#began = client.runtime.now();
    this.#endsAt = this.#began + answer.lease_left * 1000;
  }

  get id(): string {
    return this.#answer.id;
  }

  /** `open`, `settled`, `cancelled` or `expired`, when the hub was asked last. */
  get state(): string {
    return this.#answer.state;
  }

  /** The path of the agent when the hold was made. */
  get account(): string {
    return this.#answer.account;
  }

  /** What is reserved, or was settled, as decimals by resource. */
  get costs(): Readonly<Record<string, string>> {
    return this.#answer.costs;
  }

  /** Whether its lease has ended, or it was forgotten, while it was in use. */
  get lost(): boolean {
    return this.#lost;
  }

  /** Adds to what the settlement counts. It is a sum in this process. */
  use(costs: Costs): void {
    for (const [name, amount] of Object.entries(writtenCosts(costs))) {
      this.#used[name] = sum(this.#used[name] ?? "0", amount);
    }
  }

  /** Ends it with these costs, or else with what `use` has added up; for other resources, with what is reserved. */
  async settle(costs: Costs = {}): Promise<void> {
    const counted = { ...this.#used, ...writtenCosts(costs) };
    await this.#change("settle", Object.keys(counted).length > 0 ? { costs: counted } : {});
  }

  /** Ends it, and gives back all that it has reserved. */
  async cancel(): Promise<void> {
    await this.#change("cancel");
  }

  /** Reserves so much more, or rejects with `rate_limited`; and lets the lease end so many milliseconds from now. */
  async extend(costs?: Costs, { leaseMs }: { leaseMs?: number } = {}): Promise<void> {
    const body: Record<string, unknown> = leaseMs === undefined ? {} : { lease: leaseMs / 1000 };
    if (costs !== undefined) {
      // In total, so that it can be repeated.
      const more = Object.entries(writtenCosts(costs));
      body["total"] = Object.fromEntries(more.map(([name, cost]) => [name, sum(this.costs[name] ?? "0", cost)]));
    }
    await this.#change("extend", body);
  }

  /** Renews its lease until the returned function is called, which resolves when that has ended. */
  renew(): () => Promise<void> {
    const stop = new Stop();
    const renewing = (async (): Promise<void> => {
      while (!this.#lost) {
        await stop.pause(this.client.runtime, this.leaseMs / 3);
        if (stop.stopped || this.client.runtime.now() - this.#began >= this.maxAgeMs) {
          return;
        }
        await this.#renewOnce(stop);
      }
    })();
    return async () => {
      stop.stop();
      await renewing;
    };
  }

  async #renewOnce(stop: Stop): Promise<void> {
    try {
      await this.#change("extend", { lease: this.leaseMs / 1000 }, stop);
    } catch (error) {
      const ended = error instanceof HoldError && ["hold_error", "unknown_hold"].includes(error.code);
      this.#lost = ended || this.client.runtime.now() >= this.#endsAt;
      if (!ended && !stop.stopped) {
        console.warn(`the lease of hold ${this.id} can't be renewed: ${String(error)}`);
      }
    }
  }

  /** Ends a block: settled, or expired if it has failed; with what was used, if that is more than is reserved. */
  async end(failed: boolean): Promise<void> {
    if (!["open", "expired"].includes(this.state)) {
      return;
    }
    try {
      const more = Object.entries(this.#used).filter(([name, used]) => isLess(this.costs[name] ?? "0", used));
      if (!failed) {
        await this.settle();
      } else if (more.length > 0) {
        this.#used = Object.fromEntries(more);
        await this.settle();
      } else {
        await this.#change("extend", { lease: 0 });
      }
    } catch (error) {
      if (error instanceof HoldError && error.code === "unknown_hold") {
        this.#lost = true;
      } else if (!failed) {
        throw error;
      }
      console.warn(`hold ${this.id} was not ended: ${String(error)}`);
    }
  }

  async #change(verb: string, body?: object, stop?: Stop): Promise<void> {
    this.#answer = holdOf(await this.client.request("POST", this.client.path(this.id, verb), body, 0, stop));
    this.#endsAt = this.client.runtime.now() + this.#answer.lease_left * 1000;
  }
}

/**
 * A program's connection to the decision service of a hub.
 *
 *     const client = new HoldClient("http://localhost:8080", { token });
 *     const answer = await client.run({ tokens: 1200, usd: "0.03" }, { session: "run-42" }, async (hold) => {
 *       const answer = await askTheModel();
 *       hold.use({ tokens: answer.usage.total_tokens });
 *       return answer;
 *     });
 */
export class HoldClient {
  readonly url: string;
  readonly runtime: Runtime;
  readonly #options: HoldClientOptions;

  constructor(url: string, options: HoldClientOptions) {
    if (!/^https?:\/\/[^\s?#@]+$/.test(url)) {
      throw new TypeError(`url: expected the address of a hub, such as http://localhost:8080, got ${url}`);
    }
    this.url = url.replace(/\/+$/, "");
    this.runtime = options.runtime ?? systemRuntime;
    this.#options = options;
  }

  /** Reserves costs on the agent and all accounts above it, or rejects with `rate_limited`. */
  async hold(costs: Costs, options: HoldOptions = {}): Promise<Hold> {
    const { session, tool, leaseMs, timeoutMs = 0, id = newId(), maxAgeMs = 3_600_000 } = options;
    const body = {
      ...{ id, costs: writtenCosts(costs), timeout: timeoutMs / 1000 },
      ...(leaseMs === undefined ? {} : { lease: leaseMs / 1000 }),
      ...{ session, tool, agent: this.#options.agent }, // undefined is left out
    };
    const answer = await this.request("POST", "/v1/holds", body, timeoutMs);
    const held = holdOf(answer);
    return new Hold(this, held, leaseMs ?? Math.max(held.lease_left * 1000, 1000), maxAgeMs);
  }

  /**
   * Holds while a block runs: the lease is renewed, and the hold is settled at the end with what `hold.use` has added up,
   * or else with what was reserved. If the block throws, it ends as if its lease had: costs stay counted.
   */
  async run<T>(costs: Costs, options: HoldOptions, block: (hold: Hold) => Promise<T>): Promise<T> {
    const hold = await this.hold(costs, options);
    if (hold.state !== "open") {
      throw new HoldError("hold_error", `expected an open hold for a block, got one that is ${hold.state}`);
    }
    const stop = hold.renew();
    let result: T;
    try {
      result = await block(hold);
    } catch (error) {
      await stop();
      await hold.end(true);
      throw error;
    }
    await stop();
    await hold.end(false);
    return result;
  }

  /** A hold that was made before, perhaps by another process; rejects with `unknown_hold`. */
  async find(id: string): Promise<Hold> {
    return new Hold(this, holdOf(await this.request("GET", this.path(id))), 60_000, 3_600_000);
  }

  /** An account on the agent's path, with its limits and what is left of them. */
  async account(path: string): Promise<AccountStatus> {
    return (await this.request("GET", `/v1/accounts/${encodeURIComponent(path)}`)) as AccountStatus;
  }

  /** For `Hold`. */
  path(id: string, verb = ""): string {
    const { agent } = this.#options;
    const query = agent === undefined ? "" : `?agent=${encodeURIComponent(agent)}`;
    return `/v1/holds/${encodeURIComponent(id)}${verb && `/${verb}`}${query}`;
  }

  /** For `Hold`: sends a request until it is answered, or is to stop. */
  async request(
    method: string,
    path: string,
    body?: object,
    waitMs = 0,
    stop = new Stop(),
  ): Promise<unknown> {
    const { retryWithinMs = 30_000, answerWithinMs = 10_000 } = this.#options;
    const end = this.runtime.now() + retryWithinMs;
    for (let failures = 1; ; failures++) {
      const { answer, error, toldMs } = await this.#attempt(method, path, body, answerWithinMs + waitMs);
      if (error === undefined) {
        return answer;
      }
      const pause = Math.max(backoff(failures, () => this.runtime.random()), toldMs ?? 0);
      if (toldMs === undefined || stop.stopped || this.runtime.now() + pause > end) {
        throw error;
      }
      await stop.pause(this.runtime, pause);
    }
  }

  /** One attempt. `toldMs`: it may be repeated, not before so many milliseconds. */
  async #attempt(
    method: string,
    path: string,
    body: object | undefined,
    withinMs: number,
  ): Promise<{ answer?: unknown; error?: HoldError; toldMs?: number }> {
    const abort = new AbortController();
    const cancel = this.runtime.after(withinMs, () => abort.abort(new Error(`no answer within ${withinMs} ms`)));
    try {
      const response = await (this.#options.fetch ?? fetch)(this.url + path, {
        method,
        headers: { authorization: `Bearer ${this.#options.token}`, "content-type": "application/json" },
        redirect: "manual",
        signal: abort.signal,
        ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      });
      return read(response.status, response.headers.get("retry-after"), await response.text());
    } catch (error) {
      return { error: new HoldError("unavailable", `${this.url}: ${reasonOf(error)}`), toldMs: 0 };
    } finally {
      cancel();
    }
  }
}

function read(
  status: number,
  retryAfter: string | null,
  text: string,
): { answer?: unknown; error?: HoldError; toldMs?: number } {
  const found = parsed(text);
  if (status >= 200 && status < 300) {
    return found === undefined ? { error: new HoldError("unavailable", "expected the answer of a headgate hub") } : { answer: found };
  }
  const code = typeof found?.["error"] === "string" ? found["error"] : `status_${status}`;
  const detail = String(found?.["detail"] ?? "").slice(0, LONGEST_DETAIL);
  const toldMs = Number(retryAfter) > 0 ? toldWait(Number(retryAfter) * 1000) : 0;
  if (status === 429 && code === "rate_limited") {
    const { account, resource, tool, retry_after_ms: wait, no_wait_helps: hopeless } = found ?? {};
    const bound = account ? { account: String(account), resource: String(resource), tool: String(tool) } : undefined;
    const retryAfterMs = hopeless === true ? undefined : typeof wait === "number" ? wait : 1000;
    const error = new HoldError(code, detail, retryAfterMs, bound);
    return bound === undefined && retryAfterMs !== undefined ? { error, toldMs } : { error };
  }
  if (AGAIN.includes(status)) {
    return { error: new HoldError("unavailable", `${code}: ${detail}`), toldMs };
  }
  return { error: new HoldError(code, detail) };
}

function parsed(text: string): Record<string, unknown> | undefined {
  try {
    const found: unknown = JSON.parse(text);
    return typeof found === "object" && found !== null && !Array.isArray(found)
      ? (found as Record<string, unknown>)
      : undefined;
  } catch {
    return undefined;
  }
}

function holdOf(answer: unknown): HoldAnswer {
  const { id, state, costs, lease_left: left } = answer as Partial<HoldAnswer>;
  if (typeof id !== "string" || typeof state !== "string" || typeof costs !== "object" || typeof left !== "number") {
    throw new HoldError("unavailable", "expected the hold of a headgate hub");
  }
  return answer as HoldAnswer;
}

function reasonOf(error: unknown): string {
  const { message, cause } = error as { message?: string; cause?: unknown };
  return cause instanceof Error ? `${message}: ${cause.message}` : String(message ?? error);
}

/** 128 random bits. `randomUUID` is missing in pages that don't come over HTTPS. */
function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
