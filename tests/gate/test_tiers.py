"""Tiers that a policy defines beside light, normal and heavy (A3): they work like the built-in ones."""

import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, InvalidInput, ManualClock, MemoryStore, Outcome, Policy, PolicyError, parse
from headgate.events import Checked, Event
from headgate.gate.change_log import condense
from headgate.gate.changes import default, no_override, override
from headgate.gate.effective import effective
from headgate.gate.policy import PURPOSES

BULK = Policy(
    tiers=["bulk"],
    limits={"bulk": "5/minute", "http": {"bulk": "2/minute"}},
    actions={"ws": {"import_rows": "bulk", "ping": "bulk"}},
    agents={"planner": {"bulk": "50/minute", "ws": {"bulk": "7/minute"}}, "watched": {"shadow": True}},
)
TIERS = "light, normal, heavy, bulk"


# The policy -----------------------------------------------------------------------------------------------------------


def test_a3_a_policy_may_define_tiers_of_its_own() -> None:
    assert BULK.tiers == ("light", "normal", "heavy", "bulk")
    assert (BULK.limits["ws", "bulk"], BULK.limits["http", "bulk"]) == (parse("5/minute"), parse("2/minute"))
    assert BULK.overrides["planner"] == {("ws", "bulk"): parse("7/minute"), ("http", "bulk"): parse("50/minute")}
    assert BULK.tier_of("ws", "import_rows") == BULK.tier_of("ws", "ping") == "bulk"
    assert Policy().tiers == ("light", "normal", "heavy")


def test_tiers_come_in_their_order_on_every_channel() -> None:
    policy = Policy(tiers=["bulk", "export", "bulk"], limits={"export": "1/s", "bulk": "2/s"}, channels=["ws", "smtp"])
    every = [(channel, tier) for channel in ("ws", "smtp") for tier in ("light", "normal", "heavy", "bulk", "export")]
    assert list(policy.limits) == every
    assert list(effective(policy).limits) == every


@pytest.mark.parametrize("copied", [lambda it: pickle.loads(pickle.dumps(it)), lambda it: Policy(**it.settings())])
def test_a_policy_keeps_its_tiers_when_it_is_copied(copied: Callable[[Policy], Policy]) -> None:
    copy = copied(BULK)
    assert copy == BULK
    assert copy.tiers == BULK.tiers
    assert copy != Policy()


def test_a_policy_keeps_its_tiers_as_toml() -> None:
    assert 'tiers = ["bulk"]\n' in BULK.toml()
    assert Policy(**tomllib.loads(BULK.toml())) == BULK
    assert ("tiers", '["bulk"]', "[]") in BULK.changed()
    assert ("limits.ws.bulk", '"5/minute"', "") in BULK.changed()
    assert repr(BULK).startswith("Policy(tiers=['bulk'], ")


TAKEN = "light, normal, heavy, session, shadow, account, plan, ws, http"
NAME = f"a name of up to 64 letters, digits and underscores other than {TAKEN}"
NO_LIMIT = "expected a limit, since tiers lists bulk, got none"


@pytest.mark.parametrize(
    ("settings", "mistake"),
    [
        ({"tiers": "bulk"}, "tiers: expected a list, got 'bulk'"),
        ({"tiers": ["a b"]}, f"tiers[0]: expected {NAME}, got 'a b'"),
        ({"tiers": [""]}, f"tiers[0]: expected {NAME}, got ''"),
        ({"tiers": [5]}, f"tiers[0]: expected {NAME}, got 5"),
        ({"tiers": ["größer"]}, f"tiers[0]: expected {NAME}, got 'größer'"),
        ({"tiers": ["x" * 65]}, f"tiers[0]: expected {NAME}, got '{'x' * 65}'"),
        ({"tiers": ["heavy"]}, f"tiers[0]: expected {NAME}, got 'heavy'"),
        ({"tiers": ["ws"]}, f"tiers[0]: expected {NAME}, got 'ws'"),
        ({"tiers": ["session"]}, f"tiers[0]: expected {NAME}, got 'session'"),
        ({"tiers": ["shadow"]}, f"tiers[0]: expected {NAME}, got 'shadow'"),
        ({"tiers": ["bulk"]}, f"limits.bulk: {NO_LIMIT}"),
        ({"tiers": ["bulk"], "limits": {"ws": {"bulk": "1/s"}}}, f"limits.bulk: {NO_LIMIT} for http"),
        ({"tiers": ["blk"], "limits": {"bulk": "1/s", "blk": "1/s"}},
         "limits.bulk: expected one of blk, light, normal, heavy, ws, http (did you mean blk?)"),
        ({"tiers": ["bulk"], "limits": {"haevy": "5/minute", "bulk": "1/s"}},
         "limits.haevy: expected one of heavy, light, normal, bulk, ws, http (did you mean heavy?)"),
        ({"limits": {"bulk": "5/minute"}},
         'limits.bulk: expected one of light, normal, heavy, ws, http (or add it: tiers = ["bulk"])'),
        ({"tiers": ["bulk"], "limits": {"bulk": "1/s", "ws": {"bluk": "1/s"}}},
         "limits.ws.bluk: expected one of bulk, light, normal, heavy (did you mean bulk?)"),
        ({"tiers": ["bulk"], "limits": {"bulk": "1/s"}, "shadow": ["bluk"]},
         f"shadow[0]: expected one of {TIERS}, got 'bluk'"),
        ({"tiers": ["bulk"], "limits": {"bulk": "1/s"}, "actions": {"ws": {"ping": "bluk"}}},
         f"actions.ws.ping: expected one of {TIERS}, got 'bluk'"),
        ({"tiers": ["bulk"], "limits": {"bulk": "1/s"}, "agents": {"a": {"bluk": "1/s"}}},
         ("agents.a.bluk: expected one of bulk, light, normal, heavy, ws, http, session, shadow, account, plan "
          "(did you mean bulk?)")),
    ],
)  # fmt: skip
def test_a_mistake_in_the_tiers_is_reported_with_its_path(settings: dict[str, Any], mistake: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**settings)
    assert caught.value.mistakes == (mistake,)


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"limits": {"ws": {"bulk": "1/s"}}}, 'tiers = ["bulk"]'),
        ({"tiers": ["huge"], "limits": {"huge": "1/s", "bulk": "1/s"}}, 'tiers = ["huge", "bulk"]'),
        ({"limits": {"shadow": "1/s"}}, None),
        ({"limits": {"session": "1/s"}}, None),
        ({"limits": {"ws": {"http": "1/s"}}}, None),
        ({"limits": {"größe": "1/s"}}, None),
        ({"limits": {"b" * 80: "1/s"}}, None),
        ({"limits": {"bulk": {"x": "1/s"}}}, None),
        ({"agents": {"a": {"tokens": "1/s"}}}, None),
        ({"agents": {"a": {"ws": {"tokens": "1/s"}}}}, None),
        ({"tiers": [f"tier_{i}" for i in range(16)],
          "limits": {"bulk": "1/s", **{f"tier_{i}": "1/s" for i in range(16)}}}, None),
    ],
)  # fmt: skip
def test_an_unknown_tier_leads_to_the_setting_that_adds_it(settings: dict[str, Any], setting: str | None) -> None:
    """To all of the setting, and only if it would be accepted."""
    with pytest.raises(PolicyError) as caught:
        Policy(**settings)
    (mistake,) = caught.value.mistakes
    assert mistake.partition("(or add it: ")[2] == ("" if setting is None else f"{setting})")


def test_the_number_of_tiers_is_bounded() -> None:
    names = [f"tier_{i}" for i in range(16)]
    assert Policy(tiers=names, limits=dict.fromkeys(names, "1/s")).tiers[3:] == tuple(names)
    with pytest.raises(PolicyError, match="tiers: expected a list of 0 to 16 entries"):
        Policy(tiers=[*names, "more"], limits=dict.fromkeys([*names, "more"], "1/s"))


def test_a_bad_limit_of_a_tier_is_one_mistake() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(tiers=["bulk"], limits={"bulk": 5})
    assert caught.value.mistakes == ("limits.bulk: expected a limit such as '5/minute', or several, got 5",)


@pytest.mark.parametrize("tier", PURPOSES)
def test_no_tier_counts_in_the_buckets_of_addresses(tier: str) -> None:
    gate = Gate(Policy(tiers=[tier], limits={tier: "1/minute"}))
    assert gate.check("192.0.2.1", "ws", tier)
    with pytest.raises(PolicyError, match=f"tiers.0.: expected a name .* authentication, got '{tier}'"):
        Policy(channels=["address"], tiers=[tier], limits={tier: "1/minute"})


# The gate -------------------------------------------------------------------------------------------------------------


def test_a3_a_tier_of_the_policy_has_buckets_like_every_other() -> None:
    gate = Gate(BULK)
    assert [gate.check("a", "ws", "bulk").remaining for _ in range(5)] == [4, 3, 2, 1, 0]
    denied = gate.check("a", "ws", "bulk")
    assert denied.outcome is Outcome.DENY
    assert denied.violation is not None
    assert gate.check("a", "ws", "heavy").remaining == 9
    assert gate.check("a", "http", "bulk").remaining == 1
    assert gate.check("b", "ws", "bulk").remaining == 4
    assert gate.check("planner", "ws", "bulk").remaining == 6
    assert gate.capacity("planner", "http", "bulk") == 50
    assert gate.peek("a", "http", "bulk").remaining == 1
    assert gate.refund("a", "http", "bulk").remaining == 2
    assert gate.charge("a", "http", "bulk", 3).remaining == 0


def test_a8_actions_are_classified_into_a_tier_of_the_policy() -> None:
    gate = Gate(BULK)
    heard: list[Event] = []
    gate.subscribe(heard.append, Checked)
    assert gate.tier_of("ws", "import_rows") == "bulk"
    assert gate.check("a", "ws", action="ping").remaining == 4
    assert isinstance(heard[0], Checked)
    assert heard[0].tier == "bulk"
    assert gate.tier_of("ws", "unheard_of") == "normal"


def test_a_tier_of_the_policy_can_be_in_shadow_mode() -> None:
    gate = Gate(Policy(tiers=["bulk"], limits={"bulk": "1/minute", "heavy": "1/minute"}, shadow=["bulk"]))
    for tier, passes in (("bulk", True), ("heavy", False)):
        gate.check("a", "ws", tier)
        assert bool(gate.check("a", "ws", tier)) is passes
    watched = Gate(BULK)
    assert all(watched.check("watched", "http", "bulk") for _ in range(9))


def test_an_unknown_tier_is_refused_by_a_text_that_lists_those_of_the_policy() -> None:
    gate = Gate(BULK)
    for attempt in (
        lambda: gate.check("a", "ws", "bluk"),
        lambda: gate.peek("a", "ws", "bluk"),
        lambda: gate.limits_for("a", "ws", "bluk"),
        lambda: gate.set_override("a", "bluk", "1/s"),
        lambda: gate.set_default("bluk", "1/s"),
        lambda: gate.remove_override("a", "bluk"),
        lambda: gate.change([override("a", "bluk", "1/s")]),
    ):
        with pytest.raises(InvalidInput) as caught:
            attempt()
        assert str(caught.value) == f"tier: expected one of {TIERS}, got 'bluk'"
    assert gate.history() == []


def test_a11_limits_of_a_tier_of_the_policy_change_at_once(tmp_path: Path) -> None:
    with Gate(BULK, remember=tmp_path / "headgate.db") as gate:
        gate.check("a", "ws", "bulk", cost=5)
        gate.set_override("a", "bulk", "8/minute")
        gate.set_default("bulk", "6/minute", "http")
        assert gate.check("a", "ws", "bulk").remaining == 7
        assert gate.check("b", "http", "bulk").remaining == 5
        gate.remove_override("planner", "bulk")
        assert gate.capacity("planner", "ws", "bulk") == 5
    with Gate(BULK, remember=tmp_path / "headgate.db") as again:
        assert again.capacity("a", "ws", "bulk") == 8
        assert again.capacity("planner", "http", "bulk") == 6
        again.remove_override("a")
        assert again.capacity("a", "ws", "bulk") == 5


def test_limits_of_an_agent_are_those_that_are_enforced() -> None:
    agents = {"a": {"ws": {"bulk": "1/s"}}}
    gate = Gate(Policy(tiers=["bulk"], limits={"bulk": "2/minute"}, agents=agents, exempt=["vip"]))
    for agent in ("a", "b", "vip"):
        found = gate.effective.limits_of(agent)
        assert found == {place: gate.limits_for(agent, *place) for place in gate.policy.limits}
    assert gate.limits_for("b", "ws", action="ping") == gate.limits_for("b", "ws", "light")


# Reloads --------------------------------------------------------------------------------------------------------------


def test_a_reload_that_adds_a_tier_works_at_once() -> None:
    gate = Gate(Policy(), store=MemoryStore(clock=ManualClock()))
    gate.check("a", "ws", "heavy", cost=4)
    gate.reload(BULK)
    assert gate.check("a", "ws", "bulk").remaining == 4
    assert gate.check("a", "ws", action="import_rows").remaining == 3
    assert gate.peek("a", "ws", "heavy").remaining == 6, "the other tiers keep their counts"
    gate.set_override("a", "bulk", "9/minute")
    assert gate.capacity("a", "http", "bulk") == 9


def test_changes_to_a_removed_tier_are_kept_and_come_back_with_it(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    with Gate(BULK, remember=path, store=MemoryStore(clock=ManualClock())) as gate:
        gate.change(
            [override("a", "bulk", "8/minute"), override("a", "heavy", "3/minute"), default("bulk", "6/minute")]
        )
        gate.check("a", "ws", "bulk", cost=8)
        gate.reload(Policy())
        assert gate.effective.overrides == {"a": {(channel, "heavy"): parse("3/minute") for channel in ("ws", "http")}}
        assert set(gate.effective.limits) == set(Policy().limits)
        with pytest.raises(InvalidInput, match="tier: expected one of light, normal, heavy, got 'bulk'"):
            gate.check("a", "ws", "bulk")
        gate.set_override("b", "heavy", "4/minute")
    with Gate(Policy(), remember=path) as restarted:
        assert restarted.capacity("a", "ws", "heavy") == 3
        assert len(restarted.history()) == 2
        restarted.reload(BULK)
        assert restarted.capacity("a", "ws", "bulk") == 8
        assert restarted.capacity("b", "http", "bulk") == 6
        assert restarted.check("a", "ws", "bulk").remaining == 7


def test_a_tier_that_comes_back_begins_with_full_buckets() -> None:
    gate = Gate(BULK, store=MemoryStore(clock=ManualClock()))
    gate.check("a", "ws", "bulk", cost=5)
    gate.check("planner", "ws", "bulk", cost=7)
    gate.reload(Policy())
    gate.reload(BULK)
    assert gate.check("a", "ws", "bulk").remaining == 4
    assert gate.check("planner", "ws", "bulk").remaining == 6


def test_a_compaction_without_the_tier_keeps_the_changes_to_it() -> None:
    course = [override("a", "bulk", "8/minute"), default("bulk", "6/minute"), no_override("planner", "bulk")]
    kept = condense(Policy(), course)
    assert effective(BULK, kept) == effective(BULK, course)
    assert effective(Policy(), kept) == effective(Policy())
