// The dashboard: what the hub says, shown; who looks, and what of it they want to see.

import { Alerts } from "./alerts.js";
import { Cards } from "./cards.js";
import { Changes } from "./changes.js";
import { Timeline } from "./charts.js";
import { element, figures, mark, one, say, show, where } from "./dom.js";
import { keep, kept } from "./keeping.js";
import { Live } from "./live.js";

const STORES = { memory: "in memory", ok: "connected", away: "away" };

const view = { search: "", show: "all", sort: "usage" };
let token = "";
let typed = false; // rather than from a link, or kept
let heard = 0; // when the hub said something last
let summary = null;

const changes = new Changes({ token: () => token, agent: (name) => cards.agent(name) });
const cards = new Cards((name) => changes.open(name));
const timeline = new Timeline();
const alerts = new Alerts(choose);
const live = new Live({ hear, tell, refuse });

// What the hub says ---------------------------------------------------------------------------------------------------

function hear(frame) {
  heard = Date.now();
  if (frame.type === "snapshot") {
    show(one("board"), true);
    if (!one("sign-in").hidden) one("content").focus(); // where the form was
    show(one("sign-in"), false);
    show(one("sign-out"), Boolean(token));
    show(one("sign-in-instead"), !token);
    timeline.load(frame);
    cards.load(frame);
  } else {
    timeline.take(frame);
    cards.take(frame);
  }
  if (frame.summary) summary = frame.summary;
  if (frame.alerts) alerts.take(frame.alerts); // at once: a notification is for those who don't look
  later();
}

let drawing = 0;

/** Draw with the next picture: a tab in the background draws nothing, and everything when it is looked at again. */
function later() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (!summary) return;
    drawSummary();
    timeline.draw();
    cards.draw();
    if (one("change").open) changes.draw();
  });
}

function drawSummary() {
  say(one("violations"), figures.format(summary.violations_last_hour));
  say(one("rate"), figures.format(summary.checks_per_second));
  say(one("denied-share"), `${figures.format(summary.denied_share * 100)} %`);
  say(one("exempt"), figures.format(summary.exempt));
  say(one("store"), STORES[summary.store]);
  mark(one("store"), "data-store", summary.store);
  const [checks, denied] = [summary.checks, summary.denied].map(figures.format);
  say(one("totals"), `${checks} checks since the hub started, ${denied} denied`);
  const worst = summary.worst_offenders;
  show(one("no-offenders"), !worst.length);
  const list = one("offenders");
  while (list.children.length > worst.length) list.lastElementChild.remove();
  worst.forEach(({ agent_id: name, violations }, at) => {
    const row = list.children[at] ?? list.appendChild(offender());
    say(row.querySelector("bdi"), name);
    say(row.querySelector("b"), figures.format(violations));
  });
}

function offender() {
  const [row, button, name, count] = ["li", "button", "bdi", "b"].map((kind) => element(kind));
  [button.type, button.className, name.dir] = ["button", "link", "auto"];
  button.append(name);
  button.addEventListener("click", () => choose(name.textContent));
  row.append(button, count);
  return row;
}

// Whether it says anything --------------------------------------------------------------------------------------------

function tell(state, why) {
  const since = heard ? `, last heard ${new Date(heard).toLocaleTimeString("en-GB")}` : "";
  const texts = { connecting: "Connecting…", live: "Live", lost: `Reconnecting…${since}${why && `: ${why}`}` };
  mark(one("state"), "data-state", state);
  say(one("state"), texts[state]);
}

// Who looks -----------------------------------------------------------------------------------------------------------

function signIn(given, byHand = false) {
  [token, typed] = [given, byHand];
  keep("token", token, "sessionStorage");
  live.open(token);
}

/** The hub doesn't let us look. */
function refuse({ error, detail, retry_after_ms: wait }) {
  keep("token", "", "sessionStorage");
  changes.close();
  alerts.clear();
  [summary, heard] = [null, 0];
  let text = token ? `The hub says: ${detail}.` : "";
  if (error === "rate_limited") text = `The hub says: ${detail}; try again in ${Math.ceil(wait / 1000)} s.`;
  else if (token && !typed) text += " A link is good until its hub stops, and so is this tab's memory of it.";
  token = "";
  askForToken(text);
}

function askForToken(error) {
  mark(one("state"), "data-state", "out");
  say(one("state"), "Signed out");
  show(one("board"), false);
  show(one("sign-in"), true);
  show(one("sign-out"), false);
  show(one("sign-in-instead"), false);
  say(one("sign-in-error"), error);
  one("token").value = "";
  one("token").focus();
}

one("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  say(one("sign-in-error"), "");
  signIn(one("token").value.trim(), true);
});
one("sign-out").addEventListener("click", () => {
  keep("token", "", "sessionStorage");
  location.reload(); // nothing of what was seen is left
});
one("sign-in-instead").addEventListener("click", () => {
  live.close();
  askForToken("");
});

// What they want to see -----------------------------------------------------------------------------------------------

/** Show one agent alone. */
function choose(name) {
  Object.assign(view, { search: `"${name}"`, show: "all" });
  look();
  one("agents-section").scrollIntoView({ block: "start" });
}

/** Show what is wanted, and write it behind the # of the address, where no server sees it. */
function look() {
  one("search").value = view.search;
  one("sort").value = view.sort;
  for (const input of one("filters").elements) if (input.name) input.checked = input.value === view.show;
  const wanted = new URLSearchParams();
  if (view.search) wanted.set("search", view.search);
  if (view.show !== "all") wanted.set("show", view.show);
  if (view.sort !== "usage") wanted.set("sort", view.sort);
  const hash = wanted.size ? `#${wanted}` : "";
  if (hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
  cards.show(view);
}

/** Read what is behind the #: what is wanted, and a token, which is taken away at once. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const [which, sort] = [given.get("show"), given.get("sort")];
  view.search = given.get("search") ?? "";
  view.show = [...one("filters").elements].some((input) => input.value && input.value === which) ? which : "all";
  view.sort = [...one("sort").options].some((option) => option.value === sort) ? sort : "usage";
  look();
  return given.get("token") ?? "";
}

one("search").addEventListener("input", (event) => {
  view.search = event.target.value;
  look();
});
one("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  view.search = "";
  look();
});
one("sort").addEventListener("change", (event) => {
  view.sort = event.target.value;
  look();
});
one("filters").addEventListener("change", (event) => {
  view.show = event.target.value;
  look();
});
one("show-all").addEventListener("click", () => {
  Object.assign(view, { search: "", show: "all" });
  look();
  one("search").focus();
});
one("skip").addEventListener("click", (event) => {
  event.preventDefault(); // what is behind the # is ours
  const target = one("board").hidden ? one("token") : one("search");
  target.focus();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio]), dialog");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || one("board").hidden) return;
  event.preventDefault();
  one("search").focus();
  one("search").select();
});
addEventListener("hashchange", () => {
  const given = readAddress();
  if (given) signIn(given);
});

// Light and dark ------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function paint() {
  const theme = kept("theme") || (dark.matches ? "dark" : "light");
  mark(document.documentElement, "data-theme", theme);
  say(one("theme"), theme === "dark" ? "Light" : "Dark");
  mark(one("theme"), "aria-label", theme === "dark" ? "Light: use light colours" : "Dark: use dark colours");
}

one("theme").addEventListener("click", () => {
  const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  keep("theme", wanted === (dark.matches ? "dark" : "light") ? "" : wanted); // what the system says needs no keeping
  paint();
});
dark.addEventListener("change", paint);

// Begin ---------------------------------------------------------------------------------------------------------------

paint();
show(one("without-script"), false);
say(one("how-to-register"), `curl ${where("api/onboard/register")} -d '{"agent_id": "planner"}'`);
say(one("how-to-connect"), String(where("ws")).replace("http", "ws"));
setInterval(() => cards.tick(), 1000);
signIn(readAddress() || kept("token", "sessionStorage"));
