// Notices in a corner of the page, and those of the browser.

import { byId, element, fromTemplate, setAttribute, setText, setVisible } from "./dom.js";
import { store, stored } from "./storage.js";

const MOST_TOASTS = 3;

/** Show a notice until it is dismissed or displaced by newer ones. With a name and an address, it leads there. */
export function toast(text, name = "", href = "") {
  const node = fromTemplate("toast-template");
  const words = node.querySelector("p");
  setText(words, text);
  if (href) {
    const link = element("a", "Show", "link");
    setAttribute(link, "href", href);
    setAttribute(link, "aria-label", `Show ${name}`);
    words.append(" ", link);
  }
  node.querySelector("button").addEventListener("click", () => node.remove());
  const toasts = byId("toasts");
  toasts.append(node);
  while (toasts.children.length > MOST_TOASTS) toasts.firstElementChild.remove();
  return node;
}

const allowed = () => "Notification" in window && Notification.permission === "granted" && stored("notify") === "on";

/** Notify by the browser, if the user wants that. */
export function notify(title, text, tag) {
  if (!allowed()) return;
  try {
    new Notification(`headgate: ${title}`, { body: text, tag, renotify: true });
  } catch {
    // some phones allow only service workers to notify; the page shows a notice anyway
  }
}

/** The button that asks for notifications. Nobody is asked without a click. */
export function startNotifications() {
  const draw = () => setAttribute(byId("notify"), "aria-pressed", allowed());
  byId("notify").addEventListener("click", async () => {
    if (allowed()) store("notify", "off");
    else if ((await Notification.requestPermission()) === "granted") store("notify", "on");
    else toast("The browser's settings for this site block notifications.");
    draw();
  });
  setVisible(byId("notify"), "Notification" in window && window.isSecureContext);
  draw();
}
