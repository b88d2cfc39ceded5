// How a limit of an account is shown, wherever it is. Amounts are decimals, which the hub sends as text.

import { timeText } from "./dom.js";
import { drawMeter, percent } from "./state.js";

const amounts = new Intl.NumberFormat("en", { maximumFractionDigits: 9 }); // as many as a unit can have
const UNITS = 1e6; // in which shares are compared: no unit has more decimals that matter

/** A resource, and the tool for which it is limited. */
export const resourceText = ({ resource, tool }) => (tool ? `${resource} by ${tool}` : resource);

/** An amount, with all its digits. */
export const amountText = (text) => amounts.format(text);

/** The use of a limit, as that of a bucket. */
export function budgetOf({ resource, tool, amount, left, limit }) {
  const [capacity, remaining] = [amount, left].map((text) => Math.round(Number(text) * UNITS));
  return { capacity, remaining: Math.min(Math.max(remaining, 0), capacity), resource, tool, limit, left };
}

/** Draw the bar of a limit, and return its share in words. */
export function drawBudget(meter, budget) {
  const used = `${percent(budget)} %`;
  drawMeter(meter, budget, `${used} of ${budget.limit} used, ${amountText(budget.left)} left`);
  return used;
}

/** A limit in one line, for a narrow screen: "usd 20 of 20, 100 %, resets 20 Nov 00:00". */
export function briefText(limit, share) {
  const parts = [`${resourceText(limit)} ${amountText(limit.spent)} of ${amountText(limit.amount)}`, share];
  if (Number(limit.held)) parts.push(`${amountText(limit.held)} held`);
  const reset = resetText(limit);
  if (reset !== "–") parts.push(reset === "never" ? "never resets" : `resets ${reset}`);
  return parts.join(", ");
}

/** When everything has come back. A rate that is full again has nothing to come back, even while something is held. */
export const resetText = ({ resets_at: at, limit, spent, held }) => {
  if (at !== null) return timeText(at);
  return limit.endsWith(" in all") && (Number(spent) || Number(held)) ? "never" : "–";
};
