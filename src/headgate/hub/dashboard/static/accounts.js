// The accounts as a tree, the worst first: what each has spent, holds and has left. Names are only ever set as text.

import { byId, figures, fromTemplate, placeChildren, plural, setAttribute, setText, setVisible } from "./dom.js";
import { amountText, briefText, budgetOf, drawBudget, resetText, resourceText } from "./budget.js";
import { agentLink } from "./view.js";

const FEW = 40; // accounts that are all unfolded at first
const ROWS = 200; // that are drawn at first, and by each click on "Show more"
const NEAR = 0.8; // the share from which an account is named in the headline
const HOLD_MS = 5000; // for which nothing moves after a touch

const parentOf = (path) => path.slice(0, Math.max(path.lastIndexOf("/"), 0));
const nameOf = (path) => path.slice(path.lastIndexOf("/") + 1).replaceAll("%2F", "/").replaceAll("%25", "%");

/** One account in the tree. */
class Account {
  version = 0;
  children = [];
  worst = 0; // the largest share that is used here or below

  constructor(card) {
    this.set(card);
  }

  set(card) {
    this.card = card;
    this.version++;
  }
}

/** `search` is called with what is searched for. */
export class Accounts {
  #accounts = new Map(); // by path
  #rows = new Map(); // the nodes, by path and limit
  #folded = new Map(); // what the user has folded or unfolded, by path
  #ranks = new Map(); // the order that is shown, by path
  #more = 0;
  #age = 0;
  #drawn = ROWS;
  #search = "";
  #changed = true;
  #touched = -HOLD_MS;
  #roots = [];
  #body = byId("accounts").tBodies[0];

  constructor(search) {
    byId("account-search").addEventListener("input", ({ target }) => search(target.value));
    byId("account-search").addEventListener("keydown", ({ key }) => key === "Escape" && search(""));
    byId("more-account-rows").addEventListener("click", () => {
      this.#drawn += ROWS;
      this.#redraw();
    });
    for (const [id, folded] of [["fold-accounts", true], ["unfold-accounts", false]]) {
      byId(id).addEventListener("click", () => {
        for (const path of this.#accounts.keys()) this.#folded.set(path, folded);
        this.#redraw();
      });
    }
    this.#body.addEventListener("click", ({ target }) => {
      const toggle = target.closest("button.fold");
      if (!toggle) return;
      this.#folded.set(toggle.dataset.path, toggle.getAttribute("aria-expanded") === "true");
      this.#redraw();
    });
    this.#body.addEventListener("touchstart", () => (this.#touched = performance.now()), { passive: true });
  }

  /** Start again from a snapshot. */
  load({ accounts, more_accounts: more, accounts_age: age }) {
    this.#accounts.clear();
    this.update({ accounts, more_accounts: more, accounts_age: age });
    this.#changed = true;
  }

  /** Take in the changes of an update. */
  update({ accounts = [], accounts_gone: gone = [], more_accounts: more, accounts_age: age }) {
    for (const card of accounts) {
      const known = this.#accounts.get(card.path);
      if (known) known.set(card);
      else this.#accounts.set(card.path, new Account(card));
    }
    for (const path of gone) this.#accounts.delete(path);
    this.#changed ||= accounts.length > 0 || gone.length > 0 || more !== undefined;
    this.#more = more ?? this.#more;
    this.#age = age ?? this.#age;
  }

  /** Show the accounts whose paths have this text. */
  show(search) {
    if (search === this.#search) return;
    this.#search = search;
    this.#drawn = ROWS;
    byId("account-search").value = search;
    this.#changed = true;
  }

  /** `admin`: whether limits may be changed. */
  draw(admin = byId("accounts").dataset.admin === "true") {
    const many = this.#accounts.size;
    setAttribute(byId("accounts"), "data-admin", admin);
    setVisible(byId("accounts-section"), many + this.#more > 0);
    if (!many) return;
    setText(byId("accounts-age"), this.#age > 1 ? `figures up to ${figures.format(this.#age)} s old` : "");
    if (!this.#changed) return;
    this.#changed = false;
    this.#build();
    this.#headline(many);
    this.#drawRows();
  }

  #redraw() {
    this.#changed = true;
    this.draw();
  }

  #headline(many) {
    const near = [...this.#accounts.values()].filter(({ card }) => card.used >= NEAR).length;
    const all = plural(many + this.#more, "account");
    setText(byId("accounts-count"), near ? `${all}, ${figures.format(near)} at 80 % or more` : all);
    setVisible(byId("more-accounts"), this.#more > 0);
    const rest = `and ${plural(this.#more, "more account")}, of which less is used`;
    setText(byId("more-accounts"), `${rest}: headgate accounts lists them all`);
  }

  /** Put the accounts below each other, and find the worst of each branch. */
  #build() {
    const roots = [];
    for (const account of this.#accounts.values()) [account.children, account.worst] = [[], account.card.used];
    const paths = [...this.#accounts.keys()].sort((one, other) => other.length - one.length);
    for (const path of paths) {
      // A path is longer than that of its parent, so that a branch is complete when its top is reached.
      const [account, parent] = [this.#accounts.get(path), this.#accounts.get(parentOf(path))];
      if (!parent) roots.push(account);
      else {
        parent.children.push(account);
        parent.worst = Math.max(parent.worst, account.worst);
      }
    }
    this.#sort(roots);
    this.#roots = roots;
  }

  /** Sort each level, the worst first; as it was while the pointer or the focus is in the list. */
  #sort(roots) {
    const held = this.#body.matches(":hover") || this.#body.contains(document.activeElement);
    const still = held || performance.now() - this.#touched < HOLD_MS;
    const rank = ({ card }) => (still ? (this.#ranks.get(card.path) ?? Infinity) : 0);
    const order = (one, other) =>
      rank(one) - rank(other) || other.worst - one.worst || (one.card.path < other.card.path ? -1 : 1);
    const ranks = new Map();
    const walk = (accounts) => {
      accounts.sort(order);
      for (const account of accounts) {
        ranks.set(account.card.path, ranks.size);
        walk(account.children);
      }
    };
    walk(roots);
    this.#ranks = ranks;
  }

  #isFolded(account) {
    return this.#folded.get(account.card.path) ?? this.#accounts.size > FEW;
  }

  /** The accounts to draw, with their depths. */
  #visible() {
    const wanted = this.#search.toLowerCase();
    const found = [];
    const matches = (account) => account.card.path.toLowerCase().includes(wanted);
    const below = (account) => account.children.some((child) => matches(child) || below(child));
    const walk = (accounts, depth) => {
      for (const account of accounts) {
        const searched = wanted && below(account);
        if (wanted && !matches(account) && !searched) continue;
        const open = searched || !this.#isFolded(account);
        found.push({ account, depth, open });
        if (open) walk(account.children, depth + 1);
      }
    };
    walk(this.#roots, 0);
    return found;
  }

  #drawRows() {
    const visible = this.#visible();
    const [nodes, rows] = [[], new Map()];
    let left = this.#drawn;
    for (const { account, depth, open } of visible) {
      const limits = account.card.limits.length ? account.card.limits : [null];
      if ((left -= limits.length) < 0) break;
      limits.forEach((limit, at) => {
        const key = `${account.card.path}\t${at}`;
        const row = this.#rows.get(key) ?? new Row();
        row.draw(account, limit, at, depth, open);
        rows.set(key, row);
        nodes.push(row.node);
      });
    }
    this.#rows = rows;
    placeChildren(this.#body, nodes);
    setVisible(byId("more-account-rows"), left < 0);
    setVisible(byId("accounts"), visible.length > 0);
    setVisible(byId("no-account"), !visible.length);
    const searched = nameOf(this.#search);
    setText(byId("account-searched"), searched);
    setAttribute(byId("open-account-agent"), "href", agentLink(searched));
    const foldable = this.#roots.some(({ children }) => children.length);
    for (const id of ["fold-accounts", "unfold-accounts"]) setVisible(byId(id), foldable);
  }
}

/** The row of a limit. The first of an account has its name, and folds what is below. */
class Row {
  #drawn = "";

  constructor() {
    this.node = fromTemplate("account-template");
    const find = (selector) => this.node.querySelector(selector);
    this.parts = {
      head: find("th"), fold: find(".fold"), name: find("bdi"), plan: find(".plan"), below: find(".below"),
      resource: find(".resource"), meter: find(".meter"), share: find(".usage"), brief: find(".brief"), limit: find(".limit"),
      spent: find(".spent"), held: find(".held"), left: find(".left"), resets: find(".resets"), edit: find(".edit"),
    };
  }

  draw(account, limit, at, depth, open) {
    const { card, children, worst } = account;
    const drawn = `${account.version} ${at} ${depth} ${open} ${children.length} ${worst}`;
    if (drawn === this.#drawn) return;
    this.#drawn = drawn;
    const { parts } = this;
    this.#name(card, at, depth, open, children);
    setText(parts.resource, limit ? resourceText(limit) : "no limit");
    for (const part of [parts.meter, parts.edit]) setVisible(part, Boolean(limit));
    const texts = ["limit", "spent", "held", "left", "resets", "share"];
    if (!limit) for (const name of texts) setText(parts[name], "");
    if (!limit) setText(parts.brief, "no limit");
    if (!limit) return;
    setText(parts.share, drawBudget(parts.meter, budgetOf(limit)));
    setText(parts.brief, briefText(limit, parts.share.textContent));
    setText(parts.limit, limit.limit);
    setText(parts.spent, amountText(limit.spent));
    setText(parts.held, amountText(limit.held));
    setText(parts.left, amountText(limit.left));
    setText(parts.resets, resetText(limit));
    setAttribute(parts.edit, "aria-label", `Change ${parts.resource.textContent} of ${card.path}`);
    [parts.edit.dataset.path, parts.edit.dataset.resource] = [card.path, limit.resource];
    [parts.edit.dataset.tool, parts.edit.dataset.limit] = [limit.tool, limit.limit];
  }

  #name(card, at, depth, open, children) {
    const { parts } = this;
    const first = at === 0;
    setAttribute(this.node, "data-first", first);
    this.node.style.setProperty("--depth", Math.min(depth, 7));
    setText(parts.name, nameOf(card.path));
    parts.head.title = `${card.level} ${card.path}`;
    setAttribute(parts.name, "class", first ? "" : "unseen"); // read with each of its limits
    setVisible(parts.plan, first && Boolean(card.plan));
    setText(parts.plan, card.plan);
    const last = at === Math.max(card.limits.length - 1, 0);
    const rest = last && card.more_limits ? `and ${plural(card.more_limits, "more limit")}` : "";
    const folded = first && children.length && !open;
    setVisible(parts.below, Boolean(folded || rest));
    const worst = Math.max(0, ...children.map((child) => child.worst));
    setText(parts.below, folded ? `${plural(count(children), "account")} below, up to ${share(worst)}` : rest);
    setAttribute(parts.below, "data-some", Boolean(folded) && worst > NEAR);
    setVisible(parts.fold, first && children.length > 0);
    setAttribute(parts.fold, "aria-expanded", open);
    setAttribute(parts.fold, "aria-label", `Accounts below ${card.path}`);
    parts.fold.dataset.path = card.path;
  }
}

const share = (used) => `${Math.floor(used * 100)} %`;
const count = (accounts) => accounts.reduce((sum, { children }) => sum + 1 + count(children), 0);
