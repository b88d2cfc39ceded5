// The browser's storage: preferences for good, the token until the tab is closed. It may be switched off.

const PREFIX = "headgate-";

export function stored(name, storage = "localStorage") {
  try {
    return window[storage].getItem(PREFIX + name) ?? "";
  } catch {
    return "";
  }
}

export function store(name, value, storage = "localStorage") {
  try {
    if (value) window[storage].setItem(PREFIX + name, value);
    else window[storage].removeItem(PREFIX + name);
  } catch {
    // then it lasts as long as the page
  }
}
