"""Policies: the defaults, the file, and every error in it."""

import os
import re
import tomllib
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Gate, InvalidInput, Policy, PolicyError, parse
from headgate.cli import main
from headgate.gate.policy import MAX_FILE, check_agent
from headgate.hub.api.http import UNKNOWN
from headgate.hub.api.routes import ROUTES
from headgate.hub.sockets.frames import TYPES

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


def test_the_defaults() -> None:
    policy = Policy()
    assert policy.channels == ("ws", "http")
    assert policy.tiers == ("light", "normal", "heavy")
    assert (policy.warn_at, policy.exempt, policy.overrides, policy.shadow) == (0.8, frozenset(), {}, False)
    assert {purpose: str(limit) for purpose, limit in policy.address_limits.items()} == {
        "request": "60/minute",
        "registration": "5/minute",
        "connection": "600/minute",
        "authentication": "60/minute",
    }
    assert policy.backoff.steps == (1, 2, 5, 10, 30)
    assert (policy.backoff.quiet, policy.backoff.enforce) == (60, False)
    assert (policy.backoff.alert_after, policy.backoff.alert_window) == (10, 300)
    assert (policy.on_failure, policy.on_failure_holds) == ("local", "closed")
    assert (policy.store_timeout, policy.nodes) == (0.25, 1)


def test_a8_every_action_of_the_table_is_classified() -> None:
    """The policy has exactly the actions of docs/requirements.md and of the hub's routes."""
    page = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (light|normal|heavy) \| (.*?) \| (.*?) \|$", page, re.MULTILINE)
    policy = Policy()
    listed = set()
    for tier, ws, http in rows:
        for action in re.findall(r"[a-z_]+", re.sub(r"\(.*?\)", "", ws)):
            listed.add(("ws", action))
            assert policy.tier_of("ws", action) == tier
        for action in re.findall(r"([a-z_]+):", http):
            listed.add(("http", action))
            assert policy.tier_of("http", action) == tier
    routes = {("http", route.action) for route in ROUTES} | {("http", UNKNOWN)}
    frames = {("ws", kind) for kind in TYPES if kind != "session_signal"}  # which has a limit of its own
    assert set(policy.actions) == listed | routes
    assert {action for action in listed if action[0] == "ws"} == frames
    assert {action for action in listed if action[0] == "http"} <= routes
    assert policy.tier_of("ws", "unheard_of") is None


FULL = """
warn_at = 0.9
channels = ["ws", "http", "grpc"]
exempt = ["monitor"]
shadow = ["light"]

[limits]
heavy = "5/minute"
[limits.grpc]
light = ["5/second", "100/minute"]

[actions.ws]
ping = "normal"
"odd one" = "heavy"

[addresses]
limit = "30/minute"
registration = "1/minute"
exempt = ["127.0.0.1", "10.0.0.0/8", "::1"]

[agents.planner]
heavy = "100/minute"
ws.heavy = "50/minute sliding"
[agents."a b"]
shadow = true

[backoff]
steps = [0.5, 1]
quiet = 10
enforce = true

[alerts]
violations = 3
window = 60

[store]
on_failure = "closed"
on_failure_holds = "local"
timeout = 0.1
nodes = 3
"""


@pytest.fixture
def full(tmp_path: Path) -> Policy:
    path = tmp_path / "headgate.toml"
    path.write_text(FULL, encoding="utf-8")
    return Policy.load(path)


def test_a_file_can_set_everything(full: Policy) -> None:
    assert str(full.limits["grpc", "light"]) == "5/second; 100/minute"
    assert str(full.limits["ws", "heavy"]) == str(full.limits["grpc", "heavy"]) == "5/minute"
    assert str(full.limits["ws", "light"]) == "120/minute"
    assert full.overrides == {
        "planner": {
            ("ws", "heavy"): parse("50/minute sliding"),
            ("http", "heavy"): parse("100/minute"),
            ("grpc", "heavy"): parse("100/minute"),
        }
    }
    assert (full.tier_of("ws", "ping"), full.tier_of("ws", "odd one")) == ("normal", "heavy")
    assert (full.shadow, set(full.shadow_tiers), set(full.shadow_agents)) == (False, {"light"}, {"a b"})
    assert [str(network) for network in full.exempt_addresses] == ["127.0.0.1/32", "10.0.0.0/8", "::1/128"]
    assert (full.backoff.steps, full.backoff.enforce, full.backoff.alert_after) == ((0.5, 1), True, 3)
    assert (full.on_failure, full.on_failure_holds) == ("closed", "local")
    assert (full.store_timeout, full.nodes, full.warn_at) == (0.1, 3, 0.9)


def test_a_policy_writes_what_it_reads(full: Policy, tmp_path: Path) -> None:
    for policy in (Policy(), full):
        assert Policy(**policy.settings()) == policy
        path = tmp_path / "again.toml"
        path.write_text(policy.toml(), encoding="utf-8")
        assert Policy.load(path) == policy


def test_the_repr_of_a_policy_shows_its_differences_from_the_default(full: Policy) -> None:
    assert repr(Policy()) == "Policy()"
    assert repr(Policy(warn_at=0.5)) == "Policy(warn_at=0.5)"
    assert "grpc" in repr(full)


@given(st.text(min_size=1, max_size=20).filter(str.isprintable))
def test_any_agent_name_survives_a_round_trip_through_toml(name: str) -> None:
    policy = Policy(agents={name: {"heavy": "1/minute"}}, exempt=[name])
    assert policy.overrides[name]["ws", "heavy"] == parse("1/minute")
    assert Policy(**tomllib.loads(policy.toml())) == policy


NOTHING = "TokenBucket refill: expected a number above 0, got 0; to let nothing pass, write 'blocked'"
A_LIMIT = (
    "'COUNT/UNIT' or 'COUNT per N UNITS', then perhaps 'burst N' or 'sliding' (such as '60/minute burst 10'; UNIT is "
    "ms, second, minute, hour, day, week, month or year)"
)
LETTERS = "letters, digits and underscores"
TAKEN = "light, normal, heavy, session, shadow, account, plan"
SECONDS = "a number of seconds from 0.000001"
TOO_DEEP = "expected tables and lists a few levels deep, got hundreds of levels"
SECTIONS = (
    "warn_at, channels, tiers, exempt, shadow, limits, actions, addresses, sessions, accounts, agents, backoff, "
    "alerts, store, hub"
)


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"limits": {"heavy": 5}}, "limits.heavy: expected a limit such as '5/minute', or several, got 5"),
        ({"limits": {"heavy": "5/fortnight"}}, f"limits.heavy: expected {A_LIMIT}, got '5/fortnight'"),
        ({"limits": {"heavy": "0/minute"}}, f"limits.heavy: {NOTHING}"),
        ({"limits": {"ws": {"heavy": None}}},
         "limits.ws.heavy: expected a limit, its text, or several of either, got None"),
        ({"limits": {"hevy": "5/minute"}},
         "limits.hevy: expected one of heavy, light, normal, ws, http (did you mean heavy?)"),
        ({"limits": {"smtp": {}}}, "limits.smtp: expected one of light, normal, heavy, ws, http"),
        ({"limits": {"ws": {"huge": "1/s"}}},
         'limits.ws.huge: expected one of light, normal, heavy (or add it: tiers = ["huge"])'),
        ({"limits": {"a b": "1/s"}}, 'limits."a b": expected one of light, normal, heavy, ws, http'),
        ({"limits": []}, "limits: expected a table, got []"),
        ({"warn_at": 1.5}, "warn_at: expected a number from 0 to 1 with at most three decimals, got 1.5"),
        ({"channels": []}, "channels: expected a list of 1 to 1000 entries, got []"),
        ({"channels": ()}, "channels: expected a list of 1 to 1000 entries, got ()"),
        ({"channels": ["a b"]}, f"channels[0]: expected a name of {LETTERS} other than {TAKEN}, got 'a b'"),
        ({"channels": "ws"}, "channels: expected a list, got 'ws'"),
        ({"exempt": ["", 5]}, "exempt[0]: expected 1 to 128 printable characters, got ''"),
        ({"shadow": "all"}, "shadow: expected true, false or a list of tiers, got 'all'"),
        ({"shadow": ["medium"]}, "shadow[0]: expected one of light, normal, heavy, got 'medium'"),
        ({"actions": {"ws": {"ping": "tiny"}}}, "actions.ws.ping: expected one of light, normal, heavy, got 'tiny'"),
        ({"actions": {"ws": {"odd one": 5}}}, 'actions.ws."odd one": expected one of light, normal, heavy, got 5'),
        ({"addresses": {"exempt": ["1.2.3.4.5"]}},
         "addresses.exempt[0]: expected an address or a network such as '10.0.0.0/8', got '1.2.3.4.5'"),
        ({"agents": {"a\nb": {"heavy": "1/s"}}},
         'agents."a\\U0000000ab": expected 1 to 128 printable characters, got \'a\\nb\''),
        ({"agents": {"a": {"heavy": "x", "shadow": 1}}}, f"agents.a.heavy: expected {A_LIMIT}, got 'x'"),
        ({"agents": {"a": {"shadow": 1}}}, "agents.a.shadow: expected true or false, got 1"),
        ({"agents": {"a": 5}}, "agents.a: expected a table, got 5"),
        ({"backoff": {"steps": []}}, "backoff.steps: expected a list of 1 to 100 entries, got []"),
        ({"backoff": {"steps": (2,) * 101}},
         "backoff.steps: expected a list of 1 to 100 entries, got (" + "2, " * 32 + "..."),
        ({"backoff": {"steps": [1, 0]}}, f"backoff.steps[1]: expected {SECONDS} to 31536000, got 0"),
        ({"backoff": {"steps": [1e-7]}}, f"backoff.steps[0]: expected {SECONDS} to 31536000, got 1e-07"),
        ({"backoff": {"quiet": True}}, f"backoff.quiet: expected {SECONDS} to 31536000, got True"),
        ({"backoff": {"quiet": 9999999999999}},
         f"backoff.quiet: expected {SECONDS} to 31536000, got 9999999999999"),
        ({"backoff": {"quiet": float("inf")}}, f"backoff.quiet: expected {SECONDS} to 31536000, got inf"),
        ({"backoff": {"quiet": Decimal("1e999999999")}},
         f"backoff.quiet: expected {SECONDS} to 31536000, got Decimal('1E+999999999')"),
        ({"alerts": {"window": 16**5000}},
         f"alerts.window: expected {SECONDS} to 31536000, got an int of thousands of digits"),
        ({"backoff": {"enforce": "yes"}}, "backoff.enforce: expected true or false, got 'yes'"),
        ({"alerts": {"violations": 0}}, "alerts.violations: expected a whole number from 1 to 1000, got 0"),
        ({"store": {"on_failure": "retry"}}, "store.on_failure: expected one of open, closed, local, got 'retry'"),
        ({"store": {"on_failure_holds": "pass"}},
         "store.on_failure_holds: expected one of open, closed, local, got 'pass'"),
        ({"store": {"timeout": -1}}, f"store.timeout: expected {SECONDS} to 3600, got -1"),
        ({"store": {"timeout": 1e10}}, f"store.timeout: expected {SECONDS} to 3600, got 10000000000.0"),
        ({"store": {"nodes": 10_001}}, "store.nodes: expected a whole number from 1 to 10000, got 10001"),
        ({"plans": 5}, f"plans: expected one of {SECTIONS}"),
    ],
)  # fmt: skip
def test_an_error_names_the_path_the_expected_and_the_given_value(settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**settings)
    assert caught.value.mistakes[0] == mistake


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('warn_at = 2\nfoo = 1\n[limits]\nheavy = "x"\n[store]\ntimeout = 0\n', encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert len(caught.value.mistakes) == 4
    assert str(caught.value).splitlines()[0] == f"{path}: 4 mistakes"
    assert all(line.startswith("  ") for line in str(caught.value).splitlines()[1:])


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="expected a readable file, got: No such file or directory"):
        Policy.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[limits\n", encoding="utf-8")
    with pytest.raises(PolicyError, match="expected TOML, got: Expected ']'"):
        Policy.load(tmp_path / "bad.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="expected TOML, got: 'utf-8' codec"):
        Policy.load(tmp_path / "binary.toml")


@pytest.mark.parametrize(
    ("content", "mistake"),
    [
        (b"warn_at = 0.8\n\n[store]\nnodes = " + b"9" * 5000,
         "line 4: expected a number of 64 bits, got one of thousands of digits"),
        (b"[store]\nnodes = 0x" + b"f" * 5000,
         "store.nodes: expected a whole number from 1 to 10000, got an int of thousands of digits"),
        (b"[limits]\nheavy = " + b"[" * 5000 + b"]" * 5000, TOO_DEEP),
        (b"[hub]\nport = " + b"{a=" * 5000 + b"1" + b"}" * 5000, TOO_DEEP),
        (b"[backoff]\nquiet = 1e400", f"backoff.quiet: expected {SECONDS} to 31536000, got inf"),
        (b"warn_at = nan", "warn_at: expected a number from 0 to 1 with at most three decimals, got nan"),
        (b"#" * (MAX_FILE + 1), f"expected a file of at most {MAX_FILE} bytes, got a larger one"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_file_with_absurd_values_is_refused_by_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, mistake: str
) -> None:
    path = tmp_path / "headgate.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert caught.value.mistakes == (mistake,)
    assert main(["policy", "check", str(path)]) == 1
    assert capsys.readouterr().err == f"{path}: 1 mistake\n  {mistake}\n"


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):  # the one never begins, the other never ends
        with pytest.raises(PolicyError, match="expected a regular file, got a pipe or a device"):
            Policy.load(path)
    with pytest.raises(PolicyError, match="expected a readable file, got: Is a directory"):
        Policy.load(tmp_path)
    with pytest.raises(PolicyError, match="expected the path of a file, got: embedded null byte"):
        Policy.load("a\0b")


def test_settings_that_contain_themselves_are_refused() -> None:
    limits: list[Any] = []
    limits.append(limits)
    with pytest.raises(PolicyError) as caught:
        Policy(limits={"heavy": limits})
    assert caught.value.mistakes == (TOO_DEEP,)


WHERE = (
    "warn_at channels tiers exempt shadow limits limits.heavy limits.bulk limits.ws limits.ws.heavy actions actions.ws "
    "actions.ws.ping addresses addresses.limit addresses.exempt sessions sessions.limit agents agents.a "
    "agents.a.heavy agents.a.session agents.a.shadow backoff backoff.steps backoff.quiet backoff.enforce alerts "
    "alerts.violations alerts.window store store.on_failure store.on_failure_holds store.timeout store.nodes"
)
numbers = st.integers() | st.integers(-(10**30), 10**30) | st.floats() | st.sampled_from([2**63, 1e-300, 10**400])
plain = st.none() | st.booleans() | numbers | st.text() | st.sampled_from(["1/s", "ws", "bulk", "9" * 22 + "/year"])
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@given(st.dictionaries(st.sampled_from(WHERE.split()), values, max_size=3))
def test_a_policy_is_refused_by_text_or_can_be_used(given: dict[str, Any]) -> None:
    settings: dict[str, Any] = {}
    for path, value in given.items():
        *tables, name = path.split(".")
        table = settings
        for key in tables:
            inner = table.setdefault(key, {})
            table = inner if isinstance(inner, dict) else {}
        table[name] = value
    try:
        policy = Policy(**settings)
    except PolicyError:
        return
    assert Policy(**policy.settings()) == policy
    gate = Gate(policy)
    for _ in range(3):
        gate.check("a", policy.channels[0], "heavy")
        gate.check("a", policy.channels[-1], policy.tiers[-1])
    gate.record_violation("a")
    gate.check_address("192.0.2.1")


@pytest.mark.parametrize("bad", ["", "x" * 129, "a\n", "\0", 5, None, "\N{ZERO WIDTH SPACE}"])
def test_bad_agent_names_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_agent(bad)
    shown = repr(bad) if len(repr(bad)) <= 100 else repr(bad)[:97] + "..."
    assert str(caught.value) == f"agent: expected 1 to 128 printable characters, got {shown}"


def test_the_annotated_example_is_the_default_policy() -> None:
    assert Policy.load(ROOT / "docs" / "headgate.toml") == Policy()


@pytest.mark.parametrize("given", ["5 in flight", "60/minute; 5 in flight", "10 usd/calendar day", "100 in all"])
def test_budgets_and_slots_belong_to_a_limiter_or_an_account(given: str) -> None:
    elsewhere = "budgets and slots belong to a Limiter, or to [accounts] of a policy"
    expected = f"expected a rate such as '60/minute' ({elsewhere}), got {given!r}"
    settings: dict[str, dict[str, Any]] = {
        "limits.heavy": {"limits": {"heavy": given}},
        "agents.ann.heavy": {"agents": {"ann": {"heavy": given}}},
        "sessions.limit": {"sessions": {"limit": given}},
        "addresses.limit": {"addresses": {"limit": given}},
    }
    for path, mistaken in settings.items():
        with pytest.raises(PolicyError) as raised:
            Policy(**mistaken)
        assert raised.value.mistakes == (f"{path}: {expected}",)
    gate = Gate(Policy())
    changes: dict[str, Callable[[str], object]] = {
        "override": partial(gate.set_override, "ann", "heavy"),
        "default": partial(gate.set_default, "heavy"),
        "session limit": partial(gate.session, "ann", 1),
    }
    for place, change in changes.items():
        with pytest.raises(InvalidInput) as refused:
            change(given)
        assert str(refused.value) == f"{place}: {expected}"
    assert str(Gate(Policy()).limits_for("ann", "http", "heavy")) == str(Policy().limits["http", "heavy"])
