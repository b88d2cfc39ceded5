// The dashboard: frames of the hub, signing in, and the view that the user has chosen.

import { AccountChanges } from "./account_changes.js";
import { Accounts } from "./accounts.js";
import { AgentPage } from "./agent_page.js";
import { Agents } from "./agents.js";
import { Alerts } from "./alerts.js";
import { HubApi } from "./api.js";
import { Changes } from "./changes.js";
import { setAttribute, byId, setText, setVisible, hubUrl } from "./dom.js";
import { AgentList } from "./list.js";
import { Live } from "./live.js";
import { store, stored } from "./storage.js";
import { drawSummary, startOverview } from "./summary.js";
import { startTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { refreshTip } from "./tip.js";
import { startNotifications } from "./toasts.js";
import { agentLink, listLink, readView } from "./view.js";

let view = readView("");
let token = "";
let typed = false; // rather than from a link or the browser's storage
let lastFrame = 0; // when it came
let summary = null;
let left = 0; // where the page with the list was scrolled to when it was left

const api = new HubApi(() => token);
const agents = new Agents();
const list = new AgentList(agents, choose);
const page = new AgentPage(agents, api, () => summary && view.agent && draw());
const changes = new Changes(api, page);
const timeline = new Timeline();
const alerts = new Alerts(api);
const accounts = new Accounts((account) => choose({ account }));
const accountChanges = new AccountChanges(api);
const live = new Live({ onFrame, onState, onRefused });

// Frames of the hub ---------------------------------------------------------------------------------------------------

function onFrame(frame) {
  lastFrame = Date.now();
  if (frame.type === "snapshot") {
    const asked = !byId("sign-in").hidden;
    setVisible(byId("board"), true);
    setVisible(byId("sign-in"), false);
    if (asked) byId("content").focus(); // where the form was
    setVisible(byId("sign-out"), Boolean(token));
    setVisible(byId("sign-in-instead"), !token);
    setText(byId("who"), frame.name && `${frame.name}${frame.admin ? "" : ", viewer"}`);
    timeline.load(frame);
    agents.load(frame);
    accounts.load(frame);
  } else {
    timeline.update(frame);
    agents.update(frame);
    accounts.update(frame);
  }
  if (frame.summary) summary = frame.summary;
  alerts.update(frame); // at once: notifications are for hidden pages
  drawTitle();
  scheduleDraw();
}

let drawing = 0;

/** Draw with the next animation frame: a hidden tab draws nothing until it is visible again. */
function scheduleDraw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    if (summary) draw();
  });
}

function draw() {
  if (view.agent) {
    page.draw();
    changes.draw(agents.admin);
  } else {
    drawSummary(summary);
    timeline.draw();
    alerts.draw(summary.open_alerts);
    accounts.draw(agents.admin);
    list.draw();
  }
  refreshTip();
}

function drawTitle() {
  const open = summary?.open_alerts ? `(${summary.open_alerts}) ` : "";
  const title = `${open}${view.agent ? `${view.agent} - ` : ""}headgate`;
  if (document.title !== title) document.title = title;
}

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
  alerts.clear();
  accounts.load({ accounts: [], more_accounts: 0, accounts_age: 0 });
  list.reset();
  page.open(view.agent);
  [summary, lastFrame] = [null, 0];
  drawTitle();
  let text = token ? `The hub says: ${detail}.` : "";
  if (error === "rate_limited") text = `The hub says: ${detail}; try again in ${Math.ceil(wait / 1000)} s.`;
  else if (token && !typed) text += " A link is valid until its hub stops, also in a tab that was opened by it.";
  token = "";
  askForToken(text);
}

function askForToken(error) {
  setAttribute(byId("state"), "data-state", "out");
  setText(byId("state"), "Signed out");
  setText(byId("who"), "");
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

/** Change the view of the list. */
function choose(parts) {
  Object.assign(view, parts);
  applyView();
}

/** Show the view, and write it to the address. */
function applyView() {
  const hash = view.agent ? agentLink(view.agent) : listLink(view);
  if (hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
  setVisible(byId("fleet"), !view.agent);
  setVisible(byId("agent-page"), Boolean(view.agent));
  if (!view.agent) {
    setAttribute(byId("back"), "href", hash || "#");
    byId("search").value = view.search;
    byId("sort").value = view.sort.replace("-", "");
    for (const input of byId("filters").elements) if (input.name) input.checked = input.value === view.show;
    list.show(view);
    accounts.show(view.account);
  }
  drawTitle();
  if (summary) draw();
}

/** Go to the view of the address. A token in it is removed from the address at once, and returned. */
function followAddress() {
  const [before, account] = [view.agent, view.account];
  const { token: given, ...wanted } = readView(location.hash);
  if (!before && wanted.agent) left = scrollY;
  view = wanted;
  if (view.agent !== before) {
    page.open(view.agent);
    changes.reset();
    accountChanges.close();
  }
  applyView();
  if (!view.agent && view.account && view.account !== account) {
    byId("account-search").focus(); // an alert leads here
    return given;
  }
  if (view.agent === before) return given;
  scrollTo(0, view.agent ? 0 : left);
  if (view.agent) byId("agent-title").focus({ preventScroll: true });
  else if (!list.focus(before)) byId("content").focus({ preventScroll: true });
  return given;
}

byId("search").addEventListener("input", ({ target }) => choose({ search: target.value }));
byId("search").addEventListener("keydown", ({ key }) => key === "Escape" && choose({ search: "" }));
byId("sort").addEventListener("change", ({ target }) => choose({ sort: target.value }));
byId("filters").addEventListener("change", ({ target }) => choose({ show: target.value }));
byId("show-all").addEventListener("click", () => {
  choose({ search: "", show: "all" });
  byId("search").focus();
});
byId("back").addEventListener("click", (event) => {
  event.preventDefault(); // an empty fragment would stay in the address
  history.pushState(null, "", location.pathname + location.search + byId("back").hash.replace(/^#$/, ""));
  followAddress();
});
byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment holds the view
  const target = byId("board").hidden ? byId("token") : view.agent ? byId("agent-title") : byId("search");
  target.focus();
});
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input:not([type=radio], [type=checkbox])");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || byId("board").hidden) return;
  if (view.agent) return;
  event.preventDefault();
  byId("search").focus();
  byId("search").select();
});
for (const event of ["popstate", "hashchange"]) {
  addEventListener(event, () => {
    const given = followAddress();
    if (given) signIn(given);
  });
}
history.scrollRestoration = "manual"; // the browser would scroll before the list is back

// Start ---------------------------------------------------------------------------------------------------------------

startTheme();
startOverview();
startNotifications();
setVisible(byId("without-script"), false);
setText(byId("how-to-register"), `curl ${hubUrl("api/onboard/register")} -d '{"agent_id": "planner"}'`);
setText(byId("how-to-connect"), String(hubUrl("ws")).replace("http", "ws"));
setInterval(() => (view.agent ? page.tick() : list.tick()), 1000);
signIn(followAddress() || stored("token", "sessionStorage"));
