// Light and dark: as the system says, unless the user chooses.

import { byId, setAttribute, setText } from "./dom.js";
import { store, stored } from "./storage.js";

const dark = matchMedia("(prefers-color-scheme: dark)");

function applyTheme() {
  const theme = stored("theme") || (dark.matches ? "dark" : "light");
  setAttribute(document.documentElement, "data-theme", theme);
  setText(byId("theme"), theme === "dark" ? "Light" : "Dark");
  setAttribute(byId("theme"), "aria-label", theme === "dark" ? "Light: use light colours" : "Dark: use dark colours");
}

export function startTheme() {
  byId("theme").addEventListener("click", () => {
    const wanted = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    store("theme", wanted === (dark.matches ? "dark" : "light") ? "" : wanted); // the system's choice is not stored
    applyTheme();
  });
  dark.addEventListener("change", applyTheme);
  applyTheme();
}
