// The fleet as a whole: figures, tasks, and who was denied.

import { byId, element, figures, plural, rateText, setAttribute, setCount, setText, setVisible } from "./dom.js";
import { store, stored } from "./storage.js";
import { agentLink } from "./view.js";

const STORES = { memory: "in memory", ok: "connected", away: "away", lost: "lost" };
const TASKS = ["waiting", "held", "done", "failed"];
const MOST_PATHS = 5;

const narrow = matchMedia("(max-width: 1000px)");

export function drawSummary(summary) {
  drawFigures(summary);
  for (const name of TASKS) setText(byId(`tasks-${name}`), figures.format(summary.tasks[name]));
  setAttribute(byId("tasks-failed"), "data-some", summary.tasks.failed > 0);
  setText(byId("problems"), summary.problems.join("; "));
  setVisible(byId("problems"), summary.problems.length > 0);
  drawOverruled(summary.overruled);
  drawList("offenders", summary.worst_offenders, ({ agent_id: name, violations }) => [name, "", violations]);
  setVisible(byId("no-offenders"), !summary.worst_offenders.length);
  drawList("addresses", summary.denied_addresses, ({ address, purpose, denials }) => [address, purpose, denials]);
  const more = summary.address_denials - summary.denied_addresses.reduce((sum, { denials }) => sum + denials, 0);
  setVisible(byId("no-addresses"), !summary.address_denials);
  setVisible(byId("more-addresses"), more > 0);
  setText(byId("more-addresses"), `${plural(more, "denial")}${summary.denied_addresses.length ? " of other addresses" : ""}`);
}

function drawFigures(summary) {
  const some = { "open-alerts": summary.open_alerts, limited: summary.limited, blocked: summary.blocked };
  for (const [id, many] of Object.entries(some)) {
    setText(byId(id), figures.format(many));
    setAttribute(byId(id), "data-some", many > 0);
  }
  setText(byId("violations"), figures.format(summary.violations_last_hour));
  setText(byId("rate"), figures.format(summary.checks_per_second));
  setText(byId("denied-rate"), rateText(summary.denied_per_second));
  setText(byId("denied-share"), `${figures.format(summary.denied_share * 100)} %`);
  setText(byId("exempt"), figures.format(summary.exempt));
  setText(byId("store"), STORES[summary.store]);
  setAttribute(byId("store"), "data-store", summary.store);
  const [checks, denied] = [summary.checks, summary.denied].map(figures.format);
  setText(byId("totals"), `${checks} checks and holds since the hub started, ${denied} denied`);
}

function drawOverruled(paths) {
  setVisible(byId("overruled"), paths.length > 0);
  const rest = paths.length - MOST_PATHS;
  const named = paths.slice(0, MOST_PATHS).join(", ") + (rest > 0 ? ` and ${figures.format(rest)} more` : "");
  setText(byId("overruled-paths"), named);
}

/** A list of names, each with something about it and a number. Names of agents lead to their pages. */
function drawList(id, found, parts) {
  const list = byId(id);
  setCount(list, found.length, () => listRow(id === "offenders"));
  found.forEach((one, at) => {
    const [name, about, many] = parts(one);
    const row = list.children[at];
    setText(row.querySelector("bdi"), name);
    setText(row.querySelector(".about"), about);
    setText(row.querySelector("b"), figures.format(many));
    if (id === "offenders") setAttribute(row.querySelector("a"), "href", agentLink(name));
  });
}

function listRow(isAgent) {
  const [row, name] = [element("li"), element("bdi")];
  name.dir = "auto";
  const first = element(isAgent ? "a" : "span", "", isAgent ? "link" : "");
  first.append(name);
  row.append(first, element("span", "", "about small muted"), element("b"));
  return row;
}

/** The overview can be folded up, and is so at first where it is narrow. */
export function startOverview() {
  const apply = () => {
    const open = (stored("overview") || (narrow.matches ? "closed" : "open")) === "open";
    setAttribute(byId("overview"), "data-open", open);
    setAttribute(byId("overview-toggle"), "aria-expanded", open);
    setText(byId("overview-toggle"), open ? "Less" : "More");
  };
  byId("overview-toggle").addEventListener("click", () => {
    const wanted = byId("overview").dataset.open === "true" ? "closed" : "open";
    store("overview", wanted === (narrow.matches ? "closed" : "open") ? "" : wanted);
    apply();
  });
  narrow.addEventListener("change", apply);
  apply();
}
