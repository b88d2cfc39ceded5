// How the state of an agent is shown, wherever it is: one mark, a few tags, and the use of a bucket.

import { figures, fromTemplate, setAttribute, setText, setVisible } from "./dom.js";

const LARGEST = 1e15; // a larger capacity means unlimited
const WORDS = ["blocked", "rate limited", "connected", "not connected", "gone"];

/** The rank of an agent's state: the worst is 0. */
export function stateOf(agent) {
  if (agent.blocked) return 0;
  if (agent.rate_limited) return 1;
  if (agent.gone) return 4;
  return agent.connected ? 2 : 3;
}

/** A node for the state of an agent. */
export const stateNode = () => fromTemplate("state-template");

export function drawState(node, agent) {
  const [mark, away, byAccount, own, free, role] = node.children;
  const state = stateOf(agent);
  setText(mark, WORDS[state]);
  setAttribute(mark, "data-state", state);
  setVisible(away, state < 2 && !agent.connected);
  setVisible(byAccount, Boolean(agent.denied_by_account));
  setVisible(own, Boolean(agent.override));
  setVisible(free, Boolean(agent.exempt));
  setVisible(role, Boolean(agent.role));
  setText(role, agent.role ?? "");
}

/** Whether a share of a bucket can be used: it is neither blocked nor unlimited. */
const isCounted = ({ capacity }) => capacity > 0 && capacity <= LARGEST;

/** Green below half, yellow up to and including four fifths, red above. Exact, in whole tokens. */
export function level({ remaining, capacity }) {
  const used = capacity - remaining;
  if (used * 5 > capacity * 4 || capacity === 0) return "red";
  return used * 2 >= capacity ? "yellow" : "green";
}

/** The used share in whole percent, on the same side of the thresholds as the colour. */
export function percent(usage) {
  if (usage.capacity === 0) return 100;
  const whole = Math.floor(((usage.capacity - usage.remaining) * 100) / usage.capacity);
  return level(usage) === "red" ? Math.max(whole, 81) : whole;
}

export function usageText(usage) {
  if (!usage) return "exempt: nothing is counted";
  const bucket = `${usage.channel} ${usage.tier}`;
  if (!isCounted(usage)) return `${usedText(usage)}, ${bucket}`;
  return `${usedText(usage)} used, ${bucket}, ${percent(usage)} %`;
}

/** What is used of a bucket. */
export function usedText(usage) {
  if (usage.capacity === 0) return "blocked";
  if (usage.capacity > LARGEST) return "unlimited";
  return [usage.capacity - usage.remaining, usage.capacity].map(figures.format).join(" of ");
}

/** The same in a few characters. */
export function shortUsage(usage) {
  if (!usage) return "–";
  return isCounted(usage) ? `${percent(usage)} %` : usedText(usage);
}

/** Draw a bar that is as wide as the share that is used; `text` says the same. */
export function drawMeter(meter, usage, text = usageText(usage)) {
  setAttribute(meter, "data-level", usage ? level(usage) : "none");
  setAttribute(meter, "aria-valuenow", usage ? percent(usage) : 0);
  setAttribute(meter, "aria-valuetext", text);
  const share = usage ? (usage.capacity ? 1 - usage.remaining / usage.capacity : 1) : 0;
  const wide = `${Math.round(share * 1000) / 10}%`;
  const bar = meter.firstElementChild;
  if (bar.style.width !== wide) bar.style.width = wide;
}

export function violationsText({ violations, violations_last_hour: hour }) {
  if (!violations && !hour) return "no violations";
  return `violations: ${figures.format(violations)} in a row, ${figures.format(hour)} in an hour`;
}
