"""A block stops an agent everywhere, whatever else holds for it, until its end or until it is taken back."""

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headgate import BLOCKED, Gate, InvalidInput, ManualClock, MemoryStore, Outcome, Policy, RedisStore, limited
from headgate.events import Alerted, Event, PolicyChanged, Violated
from headgate.gate.change_log import condense
from headgate.gate.changes import block, exemption, no_block, override
from headgate.gate.effective import effective
from headgate.stores.base import UNREADABLE, Block, Edit
from headgate.stores.change_rows import to_edit
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for
from tests.support.verbs import Verbs

START = 1_800_001_000.0  # the time of day of a ManualClock at 1000 seconds
TIERS = [(channel, tier) for channel in ("ws", "http") for tier in ("light", "normal", "heavy")]


def test_a_blocked_agent_is_denied_on_every_channel_and_tier(gate: Gate, verb: Verbs) -> None:
    gate.check("a", "ws", "heavy", cost=3)
    verb(gate, "block")("a", reason="it loops", by="ada")
    for channel, tier in TIERS:
        decision = verb(gate, "check")("a", channel, tier)
        assert (decision.outcome, decision.limit, decision.retry_after) == (Outcome.DENY, BLOCKED, None)
        assert verb(gate, "peek")("a", channel, tier).outcome is Outcome.DENY
        assert (gate.limits_for("a", channel, tier), gate.capacity("a", channel, tier)) == (BLOCKED, 0)
    assert not verb(gate, "check")("a", "http", action="post_task", request_id="r")
    assert verb(gate, "is_rate_limited")("a")
    assert gate.check("b", "ws", "heavy"), "others pass"
    assert (gate.is_blocked("a"), gate.block_of("a"), gate.effective.blocks) == (
        True,
        Block(None, "it loops"),
        {"a": Block(None, "it loops")},
    )
    verb(gate, "unblock")("a", by="bob")
    assert (gate.is_blocked("a"), gate.block_of("a"), gate.effective.blocks) == (False, None, {})
    assert gate.peek("a", "ws", "heavy").remaining == 7, "neither of them drops a bucket"
    assert [(str(change), change.by) for change in gate.history()] == [
        ("block of 'a' set: it loops", "ada"),
        ("block of 'a' removed", "bob"),
    ]


def test_a_block_wins_over_exemption_override_and_shadow_mode(store: Any) -> None:
    policy = Policy(
        exempt=["vip"], shadow=["heavy"], agents={"own": {"heavy": "99/minute"}, "watched": {"shadow": True}}
    )
    gate = Gate(policy, store=store)
    for agent in ("vip", "own", "watched", "late"):
        gate.block(agent)
    gate.add_exemption("late")
    gate.set_override("late", "light", "99/minute")
    for agent in ("vip", "own", "watched", "late"):
        for number, (channel, tier) in enumerate(TIERS, 1):
            decision = gate.check(agent, channel, tier)
            assert (decision.outcome, decision.would_be) == (Outcome.DENY, None)
            assert decision.violation is not None
            assert decision.violation.count == number
        session = gate.session(agent, 1)
        denied = session.check()
        assert (denied.outcome, denied.violation is not None) == (Outcome.DENY, True)
        gate.record_violation(agent)
        assert gate.standing(agent).violations == len(TIERS) + 2
        assert gate.is_rate_limited(agent)
        gate.unblock(agent)
    assert gate.check("vip", "ws", "light").outcome is Outcome.EXEMPT
    assert not gate.is_rate_limited("vip")
    assert gate.check("own", "ws", "heavy").remaining == 98
    assert gate.check("watched", "ws", "light").would_be is not None
    assert gate.session("watched", 1).check()


def test_a_block_of_all_in_shadow_mode_holds() -> None:
    gate = Gate(Policy(shadow=True))
    gate.block("a")
    assert not gate.check("a", "ws", "light")
    assert not gate.session("a", 1).check()
    assert gate.standing("a").violations == 2


def test_a_block_ends_by_itself(gate: Gate, clock: ManualClock) -> None:
    gate.block("a", until=START + 60, reason="a break")
    session = gate.session("a", 1, limited(1, 2))
    clock.advance(59.999)
    assert (bool(gate.check("a", "ws", "light")), session.limit) == (False, BLOCKED)
    assert gate.block_of("a") == Block(START + 60, "a break")
    clock.advance(0.001)
    assert (bool(gate.check("a", "ws", "light")), session.limit) == (True, limited(1, 2))
    assert (gate.block_of("a"), gate.is_blocked("a")) == (None, False)
    assert gate.effective.blocks == {"a": Block(START + 60, "a break")}
    clock.advance(60)
    assert not gate.is_rate_limited("a")
    gate.block("a", until=START + 300)
    assert gate.is_blocked("a"), "it can be set again"


def test_a_session_of_a_blocked_agent_keeps_its_counts(store: Any, verb: Verbs) -> None:
    gate = Gate(Policy(sessions={"limit": "1/hour burst 5"}), store=store)
    session = gate.session("a", 1)
    session.check(3)
    gate.block("a")
    assert not verb(session, "check")()
    gate.unblock("a")
    assert session.check().remaining == 1
    gate.block("a")
    verb(session, "close")()
    gate.unblock("a")
    assert gate.session("a", 1).check().remaining == 4, "a session that was closed begins anew"


def test_costs_are_counted_while_an_agent_is_blocked(store: Any, verb: Verbs) -> None:
    gate = Gate(Policy(exempt=["vip"]), store=store)
    gate.set_override("a", "light", "50/minute")
    gate.check("a", "ws", "heavy", cost=5)
    for agent in ("a", "vip"):
        gate.block(agent)
    assert verb(gate, "charge")("a", "ws", "heavy", 4).remaining == 1
    assert verb(gate, "refund")("a", "ws", "heavy", 2).remaining == 3
    assert verb(gate, "charge")("a", "ws", "light", 20).remaining == 30
    assert verb(gate, "charge")("vip", "ws", "light", 20).outcome is Outcome.EXEMPT
    assert verb(gate, "charge")("b", "ws", "heavy", 20).outcome is Outcome.DENY
    gate.unblock("a")
    assert gate.peek("a", "ws", "heavy").remaining == 3


def test_denials_by_a_block_are_violations_and_raise_an_alert() -> None:
    gate, heard = Gate(), list[Event]()
    gate.block("a")
    gate.subscribe(heard.append, Violated, Alerted)
    for _ in range(9):
        gate.check("a", "ws", "light")
    gate.session("a", 1).check()
    violations = [event for event in heard if isinstance(event, Violated)]
    assert [(event.channel, event.count) for event in violations] == [
        *(("ws", i) for i in range(1, 10)),
        ("session", 10),
    ]
    assert isinstance(heard[-1], Alerted)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"until": START}, "until: expected a moment after now, which is 1800001000, got 1800001000.0"),
        ({"until": START - 1}, "until: expected a moment after now, which is 1800001000, got 1800000999.0"),
        (
            {"until": START * 1000},
            "until: expected seconds since 1970, up to the year 9999, or None, got 1800001000000.0",
        ),
        ({"until": math.inf}, "until: expected seconds since 1970, up to the year 9999, or None, got inf"),
        ({"until": math.nan}, "until: expected seconds since 1970, up to the year 9999, or None, got nan"),
        ({"until": 10**400}, "until: expected seconds since 1970, up to the year 9999, or None, got 1000"),
        ({"until": True}, "until: expected seconds since 1970, up to the year 9999, or None, got True"),
        ({"until": "later"}, "until: expected seconds since 1970, up to the year 9999, or None, got 'later'"),
        ({"reason": "x" * 201}, "reason: expected at most 200 printable characters, got 'xxx"),
        ({"reason": "a\nb"}, "reason: expected at most 200 printable characters, got 'a\\nb'"),
        ({"reason": None}, "reason: expected at most 200 printable characters, got None"),
        ({"agent": ""}, "agent: expected 1 to 128 printable characters, got ''"),
        ({"by": 5}, "by: expected a string, got 5"),
    ],
)
def test_a_bad_block_is_refused_and_changes_nothing(options: dict[str, Any], text: str) -> None:
    gate = Gate(store=MemoryStore(clock=ManualClock(start=1000)))
    with pytest.raises(InvalidInput) as caught:
        gate.block(**{"agent": "a", **options})
    assert str(caught.value).startswith(text)
    assert (gate.history(), gate.effective.blocks) == ([], {})


@pytest.mark.parametrize(
    "edit",
    [
        block("a", START),
        Edit("block", "a", value="{}x"),
        Edit("block", "a", value="[]"),
        Edit("block", "a", value="[" * 100_000),
        Edit("block", "a", "ws", value='{"until": null}'),
        Edit("block", "", value=None),
        Edit("role", "a", value=""),
        Edit("role", "a", "", "heavy", "admin"),
        Edit("role", "", value="admin"),
    ],
    ids=lambda edit: repr(edit)[:60],
)
def test_an_edit_that_no_function_made_is_refused(edit: Edit) -> None:
    gate = Gate(store=MemoryStore(clock=ManualClock(start=1000)))
    with pytest.raises(InvalidInput):
        gate.change([exemption("b"), edit])
    assert gate.history() == []


# Changes, and what is stored of them ----------------------------------------------------------------------------------


def test_a_block_says_itself_in_words(gate: Gate) -> None:
    heard: list[Event] = []
    gate.subscribe(heard.append, PolicyChanged)
    gate.change([block("a", START + 60, "loops"), block("b", START + 60.5), no_block("c")], by="ada")
    parts = ["block of 'a' set until 2027-01-15 08:17:40 UTC: loops", "block of 'b' set until 2027-01-15 08:17:40 UTC"]
    assert heard == [PolicyChanged(", ".join([*parts, "block of 'c' removed"]), "ada")]
    assert str(Edit("block", "a", value="?")) == "block of 'a' set to ?"


def test_a_block_survives_a_restart_and_a_reload(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    with Gate(remember=path) as gate:
        gate.block("a", until=4e9, reason='ünïcode: "quoted"')
        gate.block("b")
    with Gate(remember=path) as gate:
        assert gate.effective.blocks == {"a": Block(4e9, 'ünïcode: "quoted"'), "b": Block()}
        gate.reload(Policy(limits={"light": "7/minute"}))
        assert [bool(gate.check(agent, "ws", "light")) for agent in "abc"] == [False, False, True]


def test_only_the_agent_that_is_blocked_is_looked_up_anew() -> None:
    gate = Gate(Policy(agents={f"agent-{number}": {"heavy": "5/minute"} for number in range(50)}))
    before = gate._lookup.own
    gate.block("agent-1")
    assert {agent for agent, own in gate._lookup.own.items() if before.get(agent) is not own} == {"agent-1"}
    gate.set_role("agent-2", "admin")
    gate.set_role("new", "viewer")
    assert gate._lookup.own.get("new") is None, "a role is nothing that a check has to look at"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ('{"until": null, "reason": "r"}', Block(None, "r")),
        ('{"until": 1800000000, "later": "field"}', Block(1_800_000_000.0)),
        ("{}", Block()),
        ('{"reason": ["odd"]}', Block()),
        (json.dumps({"reason": "x" * 201}), Block()),
        ('{"reason": "a\\nb"}', Block()),
        ('{"until": "soon"}', None),
        ('{"until": NaN}', None),
        ('{"until": 1e300}', None),
        ('{"until": -1}', None),
        ('{"until": true}', None),
        ("[1]", None),
        ("nothing", None),
        ("[" * 100_000, None),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_stored_block_is_read_leniently_or_not_at_all(value: str, found: Block | None) -> None:
    edit = to_edit({"kind": "block", "agent": "a", "value": value})
    assert edit.kind == (UNREADABLE if found is None else "block")
    assert effective(Policy(), [edit]).blocks == ({} if found is None else {"a": found})


def test_a_snapshot_leaves_out_blocks_that_have_long_ended() -> None:
    course = [block("a", START), block("b", START), block("c", START - 90_000), block("d"), no_block("b")]
    course += [block("e", START + 9), block("e", START - 90_000), block("f", START - 90_000), block("f", START)]
    assert condense(Policy(), course) == [course[0], course[2], course[3], course[4], course[6], course[8]]
    left = condense(Policy(), course, START + 3600)  # the clock of another node may be an hour behind
    assert left == [course[0], course[3], course[4], course[8]]
    assert effective(Policy(), left).blocks == {"a": Block(START), "d": Block(), "f": Block(START)}


def test_a_snapshot_of_a_version_that_knows_no_blocks_keeps_them() -> None:
    """A kind of a later version is condensed by agent: the newest stays."""
    course = [Edit("holiday", "a", value="1"), Edit("holiday", "b", value="1"), Edit("holiday", "a", value="2")]
    assert condense(Policy(), course) == [course[1], course[2]]


# Several nodes, and a server that is away -----------------------------------------------------------------------------


@pytest.fixture
def nodes(redis_server: ValkeyServer, tmp_path: Path) -> Iterator[tuple[ManualClock, Gate, Gate]]:
    clock, prefix = ManualClock(start=1000), f"blocks-{tmp_path.name}:"
    options: dict[str, Any] = {"prefix": prefix, "clock": clock, "timeout": PATIENCE}
    with ExitStack() as stack:
        stores = [stack.enter_context(RedisStore(redis_server.url, **options)) for _ in range(2)]
        one, other = [stack.enter_context(Gate(store=store)) for store in stores]
        yield clock, one, other


def test_a_block_holds_on_every_node(nodes: tuple[ManualClock, Gate, Gate]) -> None:
    clock, one, other = nodes
    other.check("a", "ws", "heavy", cost=4)
    one.change([block("a", START + 60, "loops"), block("b"), override("b", "heavy", "3/minute")], by="ada")
    wait_for(lambda: other.is_blocked("a"), "the block")
    assert not other.check("a", "ws", "light")
    assert other.block_of("a") == Block(START + 60, "loops")
    clock.advance(60)
    assert all(gate.check("a", "ws", "light") for gate in nodes[1:]), "its end needs no message"
    assert [gate.peek("a", "ws", "heavy").remaining for gate in nodes[1:]] == [10, 10]
    other.unblock("b")
    wait_for(lambda: not one.is_blocked("b"), "the end of the block")
    assert one.check("b", "ws", "heavy").remaining == 2


@pytest.mark.parametrize(("on_failure", "count"), [("open", 1), ("open", 3), ("local", 1), ("closed", 1)])
def test_a_block_holds_while_the_server_is_away(on_failure: str, count: int) -> None:
    with (
        ValkeyServer() as server,
        RedisStore(server.url, on_failure=on_failure, nodes=count, timeout=PATIENCE) as store,
    ):
        gate = Gate(store=store)
        gate.block("a")
        server.kill()
        for decision in (gate.check("a", "ws", "light"), gate.session("a", 1).check()):
            assert (decision.outcome, decision.degraded) == (Outcome.DENY, True)
        assert bool(gate.check("b", "ws", "light")) == (on_failure != "closed")
        gate.close()
