"""Every command in one story at a real hub, for processes of their own, and the routes that a command uses."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROUTES_TABLE = "| command | routes |"
ELSEWHERE = {"serve": "tests/hub/test_serve.py", "top": "tests/cli/test_top_terminal.py"}
"""Commands that don't end by themselves, and the tests that run them in processes."""


class Step(NamedTuple):
    """A command with its arguments, and what it prints: a pattern of its output."""

    command: str
    arguments: list[str]
    prints: str
    code: int = 0
    notes: str = ""
    """A pattern of what it prints on standard error."""


TOKEN = r"hg_\S+\n"
UNREGISTERED = r"note: no agent named {} is registered\n"
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
ONCE = r"the hub shows this (token|one) only once\n"
SIGNAL = '{"type": "seen", "entity": "page", "weight": 1, "timestamp": 1}'
ACCOUNT = r"account      plan  resource .*\nacme/search  "
NEW = "note: the account {} is new: nothing named it before\n"
STEPS = [
    Step("agents", [], r"agent .*\nplanner +yes "),
    Step("agents", ["--all"], r"agent .*\naway .*\nplanner "),
    Step("agents", ["planner"], r"agent +planner\nstate +connected; gets no new tasks for (?s:.*)ws ping +light +12"),
    Step("alerts", [], rf"raised .*\n{TIME}  planner  open +12  ws ping"),
    Step("addresses", [], r"no address was denied"),
    Step(
        "block", ["planner", "--for", "2h", "--reason", "it loops"], rf"planner is blocked until {TIME} \(it loops\)\n"
    ),
    Step("agents", ["planner"], rf"(?s:.*)\nblocked +until {TIME}: it loops\n"),
    Step("unblock", ["planner"], "planner is no longer blocked: its limits apply\n"),
    Step("unblock", ["planner"], "planner was not blocked\n"),
    Step("unblock", ["nobody"], "nobody was not blocked\n", notes=UNREGISTERED.format("nobody")),
    Step(
        "block",
        ["away", "--disconnect"],
        "away is blocked until it is unblocked\naway has no connections to this hub\n",
    ),
    Step("disconnect", ["planner"], "connections of planner closed: 1\n"),
    Step("disconnect", ["planner"], "planner has no connections to this hub\n"),
    Step("register", ["scout"], TOKEN, notes=f"note: scout is registered; {ONCE}"),
    Step("register", ["scout"], "", 1, "http://.*: .*scout.*\n"),
    Step("rotate", ["scout"], TOKEN, notes=f"note: the old token of scout no longer works; {ONCE}"),
    Step("revoke", ["scout"], "the token of scout is revoked: it can't connect any more\n"),
    Step("revoke", ["scout"], "the token of scout was revoked before\n"),
    Step("revoke", ["nobody"], "", 1, "http://.*: there is no agent 'nobody'\n"),
    Step("invite", [], r"\S+\n", notes="note: valid for one registration\n"),
    Step("override set", ["planner", "heavy=9/minute"], "overrides of planner:\n"),
    Step("override", [], r"agent .*\nplanner  ws       heavy  9/minute\n"),
    Step("override list", [], r"agent .*\nplanner  ws       heavy  9/minute\n"),
    Step("override remove", ["planner"], "planner has no overrides now"),
    Step("defaults", [], r"channel  tier     limit\nws       light    2/minute\n"),
    Step("defaults list", [], r"channel  tier     limit\nws       light    2/minute\n"),
    Step("defaults set", ["light=5/minute", "session=9/second"], r"channel .*\nws +light +5/minute\n"),
    Step("policy show", ["--effective"], r"setting .*\n(?s:.*)5/minute\S* +change by admin at 127\.0\.0\.1, " + TIME),
    Step("defaults reset", ["light"], r"channel .*\nws +light +2/minute\n(?s:.*)-        session  9/second\n"),
    Step("defaults reset", ["bulk"], "", 1, r"expected tiers of the hub.s policy \(light, .*, session\), got .bulk.\n"),
    Step("defaults reset", [], r"channel .*\n(?s:.*)-        session  unlimited\n"),
    Step("exempt add", ["away"], "away is exempt now"),
    Step("exempt set", ["scout", "monitor"], "monitor\nscout\n", notes=UNREGISTERED.format("monitor")),
    Step("exempt", [], "monitor\nscout\n"),
    Step("exempt list", [], "monitor\nscout\n"),
    Step("exempt remove", ["scout"], "scout is no longer exempt"),
    Step("violations", [], "agent .*\nplanner +12 "),
    Step("violations list", [], "agent .*\nplanner +12 "),
    Step("violations reset", ["planner"], "violations of planner reset\n"),
    Step("violations reset", ["nobody"], "nobody had", notes=UNREGISTERED.format("nobody")),
    Step("changes", ["--limit", "2"], rf"time .*\n{TIME}  admin at 127\.0\.0\.1  .*scout.*\n{TIME} .*\n$"),
    Step("accounts set", ["acme/search", "usd=500/calendar month"], ACCOUNT, notes=NEW.format("acme/search")),
    Step("accounts set", ["acme/search", "requests=9/minute", "--tool", "web"], ACCOUNT),
    Step("accounts set", ["acme/search", "euros=9/minute"], "", 1, "http://.*: resource: expected one of .*\n"),
    Step(
        "accounts move",
        ["planner", "acme/search", "--plan", "pro"],
        r"planner belongs to acme/search now, with .* pro\n",
    ),
    Step(
        "accounts move",
        ["nobody", "acme"],
        "nobody belongs to acme now\n",
        notes="note: nothing limits acme\n" + UNREGISTERED.format("nobody"),
    ),
    Step("accounts", [], r"account .*\nacme +- +- +unlimited\nacme/search  -     requests by web  9/minute "),
    Step("accounts list", ["--within", "acme/search"], ACCOUNT),
    Step("accounts show", ["acme/search"], r"(?s:.*)\nagents: planner\n"),
    Step("accounts show", ["acme/serch"], "", 1, "http://.*: no policy, .* an account .acme/serch.\n"),
    Step("accounts plan", ["acme/search", "pro"], r"account .*\nacme/search  pro "),
    Step("accounts unset", ["acme/search", "requests", "--tool", "web"], ACCOUNT),
    Step("accounts unset", ["acme/search"], r"account .*\nacme/search  -     -         unlimited\n"),
    Step("levels set", ["team", "usd=20/calendar day"], r"level .*\nteam   usd       20 usd/calendar day\n"),
    Step("levels", [], "level "),
    Step("levels list", [], "level "),
    Step("levels unset", ["team", "usd"], "no level has limits\n"),
    Step("levels unset", ["team"], "no level has limits\n"),
    Step("plans set", ["pro", "usd=60/calendar day"], r"plan  resource  limit\npro   usd       60 usd/calendar day\n"),
    Step("plans", [], "plan "),
    Step("plans list", [], "plan "),
    Step("plans unset", ["pro", "usd"], r"plan  resource  limit\npro   usd       50 usd/calendar day\n"),
    Step("plans unset", ["pro"], r"plan  resource  limit\npro   usd       50 usd/calendar day\n"),
    Step("holds list", ["acme"], r"agent .*\nplanner  first  acme/search/planner  -        web   open "),
    Step("holds cancel", ["planner", "first"], "hold first of planner is cancelled\n"),
    Step("holds cancel", ["planner", "first"], "hold first of planner is cancelled\n"),
    Step("holds list", ["acme"], "no holds\n"),
    Step("usage", ["acme", "--by", "team,tool"], r"team         tool  resource  amount\nacme/search  web   requests"),
    Step("usage", ["--csv"], r"month,resource,amount\n\d{4}-\d\d,requests,1\n"),
    Step("usage", ["--from", "2020-01-01"], "", 1, "http://.*: from: expected a day from .*\n"),
    Step("reload", [], "the policy file is reloaded\n"),
    Step("tasks push", ['{"url": "https://example.org"}'], r"task \S+ is queued\n"),
    Step("tasks", [], r"task .*\n\S+ +queued +- +0% +0  admin "),
    Step("tasks list", ["--state", "failed", "--limit", "5"], "no tasks\n"),
    Step("tasks", ["--before", "nothing"], "", 1, "http://.*: before: expected the id of a task, got 'nothing'\n"),
    Step("channels", [], rf"channel .*\ngeneral .*\nnews     planner +0  {TIME}  all news\n"),
    Step("channels list", [], "channel .*\ngeneral .*\nnews "),
    Step("channels delete", ["news"], "chat channel news is deleted, with its messages\n"),
    Step("channels delete", ["news"], "", 1, "http://.*: .*news.*\n"),
    Step("signals write", ["planner", SIGNAL], "signal 1 of planner is written\n"),
    Step("admins add", ["ann", "--role", "admin"], TOKEN, notes=f"note: ann is an admin; {ONCE}"),
    Step("admins", [], rf"name .*\n(?s:.*)ann +admin +a registration +admin at 127\.0\.0\.1  {TIME}\n"),
    Step("admins list", [], r"name .*\n(?s:.*)admin +admin +the settings "),
    Step("admins remove", ["ann"], "ann has no role now, and its token is revoked\n"),
    Step("admins remove", ["admin"], "", 1, "http://.*\n"),
    Step("role set", ["away", "viewer"], "away is a viewer now\n"),
    Step("role set", ["nobody", "viewer"], "", 1, "http://.*\n"),
    Step("role remove", ["away"], "away has no role now; its token still works\n"),
    Step("store", [], "the store is this hub's memory\n"),
    Step("store accept", ["--agent-data", "keep"], "the store has its data: there was nothing to accept\n"),
    Step("log-level", ["error"], "the hub logs from level error on, until it stops\n"),
    Step("check", ["planner", "--tier", "heavy"], "allow: ws heavy, 10/minute: 9 of 10 left\n"),
    Step("check", ["plannr", "--tier", "heavy", "--cost", "11"], "deny: ", 1, UNREGISTERED.format("plannr")),
    Step("policy check", ["headgate.toml"], r"headgate\.toml: no mistakes; changes:\n"),
    Step("policy show", ["headgate.toml"], r"(?s:.*)2/minute"),
    Step("replay", ["log.csv"], r"(?s:.*)1"),
    Step("bench", ["--seconds", "0.01"], "headgate "),
    Step("demo", ["--seconds", "0.01"], "headgate "),
    Step("completion", ["fish"], "# Completion of headgate for fish"),
]


def routes_of_commands(page: Path) -> dict[str, set[str]]:
    """The routes of each command, by the table in docs/cli.md."""
    lines = page.read_text(encoding="utf-8").partition(f"\n{ROUTES_TABLE}\n")[2].splitlines()[1:]
    return dict(_routes(lines))


def _routes(lines: list[str]) -> Iterator[tuple[str, set[str]]]:
    for line in lines:
        if not line.startswith("|"):
            return
        command, *routes = re.findall("`([^`]+)`", line)
        yield command.removeprefix("headgate "), set(routes)
