/** A cost: a whole number, or a decimal; a text such as "0.0312" is exact in any case. */
export type Amount = number | bigint | string;

/** Costs by resource, such as `{ tokens: 1200, usd: "0.03" }`. */
export type Costs = Readonly<Record<string, Amount>>;

const WRITTEN = /^\d+(\.\d+)?$/;
const SCIENTIFIC = /^(\d+)(?:\.(\d+))?e([+-]\d+)$/;

/** An amount as a decimal without an exponent. A number is the decimal that it prints. */
export function written(where: string, amount: Amount): string {
  const text = String(amount);
  const scientific = typeof amount === "number" ? SCIENTIFIC.exec(text) : null;
  if (scientific !== null) {
    const [, whole = "", fraction = "", exponent = "0"] = scientific;
    return shifted(whole + fraction, fraction.length - Number(exponent));
  }
  if (!["number", "bigint", "string"].includes(typeof amount) || !WRITTEN.test(text)) {
    throw new TypeError(`${where}: expected a number, 0 or more, got ${text}`);
  }
  return text;
}

/** All costs as decimals. */
export function writtenCosts(costs: Costs): Record<string, string> {
  if (typeof costs !== "object" || costs === null || Array.isArray(costs)) {
    throw new TypeError(`costs: expected costs by resource, such as { tokens: 1200 }, got ${String(costs)}`);
  }
  return Object.fromEntries(Object.entries(costs).map(([name, amount]) => [name, written(`cost of ${name}`, amount)]));
}

/** The exact sum of two decimals. */
export function sum(one: string, other: string): string {
  const places = Math.max(decimals(one), decimals(other));
  return shifted(String(units(one, places) + units(other, places)), places);
}

/** Whether one decimal is smaller than another. */
export function isLess(one: string, other: string): boolean {
  const places = Math.max(decimals(one), decimals(other));
  return units(one, places) < units(other, places);
}

function decimals(text: string): number {
  return text.split(".")[1]?.length ?? 0;
}

function units(text: string, places: number): bigint {
  return BigInt(text.replace(".", "") + "0".repeat(places - decimals(text)));
}

function shifted(digits: string, places: number): string {
  if (places <= 0) {
    return digits + "0".repeat(-places);
  }
  const padded = digits.padStart(places + 1, "0");
  return `${padded.slice(0, -places)}.${padded.slice(-places)}`;
}
