// The dashboard: frames of the hub, signing in, and the view that the user has chosen.

import { Alerts } from "./alerts.js";
import { Cards } from "./cards.js";
import { Changes } from "./changes.js";
import { Timeline } from "./charts.js";
import { element, figures, setAttribute, byId, setText, setVisible, hubUrl } from "./dom.js";
import { store, stored } from "./storage.js";
import { Live } from "./live.js";

const STORES = { memory: "in memory", ok: "connected", away: "away", lost: "lost" };

const view = { search: "", show: "all", sort: "usage" };
let token = "";
let typed = false; // rather than from a link or the browser's storage
let lastFrame = 0; // when it came
let summary = null;

const changes = new Changes({ token: () => token, agent: (name) => cards.agent(name) });
const cards = new Cards((name) => changes.open(name));
const timeline = new Timeline();
const alerts = new Alerts(choose);
const live = new Live({ onFrame, onState, onRefused });

// Frames of the hub ---------------------------------------------------------------------------------------------------

function onFrame(frame) {
  lastFrame = Date.now();
  if (frame.type === "snapshot") {
    setVisible(byId("board"), true);
    if (!byId("sign-in").hidden) byId("content").focus(); // where the form was
    setVisible(byId("sign-in"), false);
    setVisible(byId("sign-out"), Boolean(token));
    setVisible(byId("sign-in-instead"), !token);
    timeline.load(frame);
    cards.load(frame);
  } else {
    timeline.update(frame);
    cards.update(frame);
  }
  if (frame.summary) summary = frame.summary;
  if (frame.alerts) alerts.update(frame.alerts); // at once: notifications are for hidden pages
  scheduleDraw();
}

let drawing = 0;

/** Draw with the next animation frame: a hidden tab draws nothing until it is visible again. */
function scheduleDraw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (!summary) return;
    drawSummary();
    timeline.draw();
    cards.draw();
    if (byId("change").open) changes.draw();
  });
}

function drawSummary() {
  setText(byId("violations"), figures.format(summary.violations_last_hour));
  setText(byId("rate"), figures.format(summary.checks_per_second));
  setText(byId("denied-share"), `${figures.format(summary.denied_share * 100)} %`);
  setText(byId("exempt"), figures.format(summary.exempt));
  setText(byId("store"), STORES[summary.store]);
  setAttribute(byId("store"), "data-store", summary.store);
  setText(byId("problems"), summary.problems.join("; "));
  setVisible(byId("problems"), summary.problems.length > 0);
  const [checks, denied] = [summary.checks, summary.denied].map(figures.format);
  setText(byId("totals"), `${checks} checks since the hub started, ${denied} denied`);
  const worst = summary.worst_offenders;
  setVisible(byId("no-offenders"), !worst.length);
  const list = byId("offenders");
  while (list.children.length > worst.length) list.lastElementChild.remove();
  worst.forEach(({ agent_id: name, violations }, at) => {
    const row = list.children[at] ?? list.appendChild(offender());
    setText(row.querySelector("bdi"), name);
    setText(row.querySelector("b"), figures.format(violations));
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

// The connection's state ----------------------------------------------------------------------------------------------

function onState(state, reason) {
  const since = lastFrame ? `, last heard ${new Date(lastFrame).toLocaleTimeString("en-GB")}` : "";
  const texts = { connecting: "Connecting…", live: "Live", lost: `Reconnecting…${since}${reason && `: ${reason}`}` };
  setAttribute(byId("state"), "data-state", state);
  setText(byId("state"), texts[state]);
}

// Signing in ----------------------------------------------------------------------------------------------------------

function signIn(given, byHand = false) {
  [token, typed] = [given, byHand];
  store("token", token, "sessionStorage");
  live.open(token);
}

/** The hub refuses the token. */
function onRefused({ error, detail, retry_after_ms: wait }) {
  store("token", "", "sessionStorage");
  changes.close();
  alerts.clear();
  [summary, lastFrame] = [null, 0];
  let text = token ? `The hub says: ${detail}.` : "";
  if (error === "rate_limited") text = `The hub says: ${detail}; try again in ${Math.ceil(wait / 1000)} s.`;
  else if (token && !typed) text += " A link is valid until its hub stops, also in a tab that was opened by it.";
  token = "";
  askForToken(text);
}

function askForToken(error) {
  setAttribute(byId("state"), "data-state", "out");
  setText(byId("state"), "Signed out");
  setVisible(byId("board"), false);
  setVisible(byId("sign-in"), true);
  setVisible(byId("sign-out"), false);
  setVisible(byId("sign-in-instead"), false);
  setText(byId("sign-in-error"), error);
  byId("token").value = "";
  byId("token").focus();
}

byId("sign-in-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setText(byId("sign-in-error"), "");
  signIn(byId("token").value.trim(), true);
});
byId("sign-out").addEventListener("click", () => {
  store("token", "", "sessionStorage");
  location.reload(); // removes everything shown
});
byId("sign-in-instead").addEventListener("click", () => {
  live.close();
  askForToken("");
});

// The view ------------------------------------------------------------------------------------------------------------

/** Show one agent alone. */
function choose(name) {
  Object.assign(view, { search: `"${name}"`, show: "all" });
  applyView();
  byId("agents-section").scrollIntoView({ block: "start" });
}

/** Apply the view, and write it to the fragment of the address, which no server sees. */
function applyView() {
  byId("search").value = view.search;
  byId("sort").value = view.sort;
  for (const input of byId("filters").elements) if (input.name) input.checked = input.value === view.show;
  const wanted = new URLSearchParams();
  if (view.search) wanted.set("search", view.search);
  if (view.show !== "all") wanted.set("show", view.show);
  if (view.sort !== "usage") wanted.set("sort", view.sort);
  const hash = wanted.size ? `#${wanted}` : "";
  if (hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
  cards.show(view);
}

/** Read the view from the fragment of the address, and a token, which is removed from it at once. */
function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  const [which, sort] = [given.get("show"), given.get("sort")];
  view.search = given.get("search") ?? "";
  view.show = [...byId("filters").elements].some((input) => input.value && input.value === which) ? which : "all";
  view.sort = [...byId("sort").options].some((option) => option.value === sort) ? sort : "usage";
  applyView();
  return given.get("token") ?? "";
}

byId("search").addEventListener("input", (event) => {
  view.search = event.target.value;
  applyView();
});
byId("search").addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  view.search = "";
  applyView();
});
byId("sort").addEventListener("change", (event) => {
  view.sort = event.target.value;
  applyView();
});
byId("filters").addEventListener("change", (event) => {
  view.show = event.target.value;
  applyView();
});
byId("show-all").addEventListener("click", () => {
  Object.assign(view, { search: "", show: "all" });
  applyView();
  byId("search").focus();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment holds the view
  const target = byId("board").hidden ? byId("token") : byId("search");
  target.focus();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio]), dialog");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || byId("board").hidden) return;
  event.preventDefault();
  byId("search").focus();
  byId("search").select();
});
addEventListener("hashchange", () => {
  const given = readAddress();
  if (given) signIn(given);
});

// Light and dark ------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const theme = stored("theme") || (dark.matches ? "dark" : "light");
  setAttribute(document.documentElement, "data-theme", theme);
  setText(byId("theme"), theme === "dark" ? "Light" : "Dark");
  setAttribute(byId("theme"), "aria-label", theme === "dark" ? "Light: use light colours" : "Dark: use dark colours");
}

byId("theme").addEventListener("click", () => {
  const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  store("theme", wanted === (dark.matches ? "dark" : "light") ? "" : wanted); // the system's choice is not stored
  applyTheme();
});
dark.addEventListener("change", applyTheme);

// Start ---------------------------------------------------------------------------------------------------------------

applyTheme();
setVisible(byId("without-script"), false);
setText(byId("how-to-register"), `curl ${hubUrl("api/onboard/register")} -d '{"agent_id": "planner"}'`);
setText(byId("how-to-connect"), String(hubUrl("ws")).replace("http", "ws"));
setInterval(() => cards.tick(), 1000);
signIn(readAddress() || stored("token", "sessionStorage"));
