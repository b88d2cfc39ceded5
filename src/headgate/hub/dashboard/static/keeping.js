// What the browser keeps for us: a choice for good, the token until the tab is closed. It may keep nothing at all.

const PREFIX = "headgate-";

export function kept(name, storage = "localStorage") {
  try {
    return window[storage].getItem(PREFIX + name) ?? "";
  } catch {
    return "";
  }
}

export function keep(name, value, storage = "localStorage") {
  try {
    if (value) window[storage].setItem(PREFIX + name, value);
    else window[storage].removeItem(PREFIX + name);
  } catch {
    // then it is gone with the page
  }
}
