"""Change logs are bounded: a snapshot, and the newest 10,000 changes. In memory, in a file and in a server."""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Gate, InvalidInput, ManualClock, Policy, RedisStore
from headgate.events import PolicyChanged
from headgate.gate import change_log
from headgate.gate.change_log import KEPT, MemoryChangeLog, condense
from headgate.gate.changes import (
    block,
    default,
    exemption,
    no_block,
    no_default,
    no_override,
    override,
    role,
    session_limit,
)
from headgate.gate.effective import Effective, apply_edits, effective
from headgate.stores.base import Change, ChangeLog, Edit
from headgate.stores.sqlite import SqliteChangeLog
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once

POLICY = Policy(exempt=["filed"], agents={"filed": {"heavy": "5/minute"}})
OLD_SCHEMA = """
CREATE TABLE changes (
    number INTEGER PRIMARY KEY, at REAL NOT NULL, by TEXT NOT NULL, kind TEXT NOT NULL, agent TEXT NOT NULL,
    channel TEXT NOT NULL, tier TEXT NOT NULL, value TEXT
)
"""
OLD_COLUMNS = "kind, agent, channel, tier, value, by, at"

agents = st.sampled_from(["a", "b", "filed"])
tiers = st.sampled_from(["light", "heavy", "bulk"])
channels = st.sampled_from([None, "ws", "http", "smtp"])
limits = st.sampled_from(["1/minute", "2/minute", "5/second; 50/minute", "10/minute"])
edits = st.one_of(
    st.builds(override, agents, tiers, limits, channels),
    st.builds(no_override, agents, st.none() | tiers),
    st.builds(exemption, agents, st.booleans()),
    st.builds(default, tiers, limits, channels),
    st.builds(no_default, st.none() | tiers | st.just("session")),
    st.builds(no_default, st.none() | tiers, channels),
    st.builds(session_limit, st.none() | limits, st.none() | agents),
    st.builds(block, agents, st.sampled_from([None, 4e9])),
    st.builds(no_block, agents),
    st.builds(role, agents, st.sampled_from([None, "admin", "viewer"])),
)


def old_rows(count: int) -> list[tuple[Any, ...]]:
    """Changes as the first version wrote them."""
    rows: list[tuple[Any, ...]] = [("exemption", "filed", "", "", None, "ada", 1.0)]
    for number in range(1, count):
        agent, at = f"agent-{number % 3000}", float(number)
        if number % 5 == 0:
            rows.append(("override", agent, "", "", None, "bob", at))
        elif number % 5 == 1:
            rows.append(("exemption", agent, "", "", "exempt", "ada", at))
        elif number % 500 == 2:
            rows.append(("default", "", "ws", "heavy", f"{number}/hour", "", at))
        else:
            rows.append(("override", agent, "", "heavy", f"{number}/minute", "eve", at))
    return rows


def as_changes(rows: Iterable[tuple[Any, ...]]) -> list[Change]:
    return [Change((Edit(*row[:5]),), *row[5:]) for row in rows]


def applied(rows: Iterable[tuple[Any, ...]]) -> Effective:
    return effective(POLICY, [Edit(*row[:5]) for row in rows])


def without_generations(one: Effective) -> Any:
    return one.limits, one.overrides, one.exempt, one.session_limit, one.session_overrides, one.blocks, one.roles


# The snapshot ---------------------------------------------------------------------------------------------------------


@given(st.lists(edits, max_size=40), st.lists(edits, max_size=5), st.integers(0, 40))
def test_a_snapshot_has_the_effect_of_the_changes_in_it(before: list[Edit], after: list[Edit], first: int) -> None:
    expected = effective(POLICY, [*before, *after])
    once = condense(POLICY, before)
    assert effective(POLICY, [*once, *after]) == expected
    twice = condense(POLICY, [*condense(POLICY, before[:first]), *before[first:]])
    assert effective(POLICY, [*twice, *after]) == expected
    assert len(once) <= 80
    other = Policy(channels=["ws", "smtp"], tiers=["bulk"], limits={"bulk": "3/minute"})
    for compacting in (other, POLICY):
        assert without_generations(effective(other, condense(compacting, before))) == without_generations(
            effective(other, before)
        )


def test_a_snapshot_is_no_larger_than_the_agents_that_were_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_log, "KEPT", 2)
    course = [
        edit for i in range(500) for edit in (override(f"agent-{i}", "heavy", "5/minute"), exemption(f"agent-{i}"))
    ]
    course += [edit for i in range(499) for edit in (no_override(f"agent-{i}"), exemption(f"agent-{i}", exempt=False))]
    course += [no_override("filed"), exemption("filed", exempt=False)]
    newest_removals = course[-4:-2]
    assert condense(POLICY, course) == [*course[998:1000], *newest_removals, *course[-2:]]


def test_a_removal_outlives_a_compaction_under_a_policy_without_the_agent() -> None:
    course = [no_override("filed"), exemption("filed", exempt=False)]
    assert effective(POLICY, condense(Policy(), course)) == effective(POLICY, course)


# Every log ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite", "redis"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChangeLog]:
    if request.param == "memory":
        yield MemoryChangeLog()
    elif request.param == "sqlite":
        with closing(SqliteChangeLog(tmp_path / "headgate.db")) as file:
            yield file
    else:
        server: ValkeyServer = request.getfixturevalue("redis_server")
        with RedisStore(server.url, prefix=f"log-{tmp_path.name}:", timeout=PATIENCE) as store:
            yield store.change_log()


def test_a_node_that_lacks_a_tier_leaves_its_generation_as_it_is() -> None:
    course = [default("bulk", "6/minute"), default("bulk", "7/minute"), default("heavy", "8/minute")]
    having = Policy(tiers=["bulk"], limits={"bulk": "5/minute"})
    for first in (Policy(), having):
        snapshot = [*condense(first, course), default("bulk", "9/minute")]
        for compacted in (snapshot, condense(Policy(), snapshot)):
            assert effective(having, compacted) == effective(having, [*course, default("bulk", "9/minute")])


def test_many_changes_of_a_tier_that_a_node_lacks_push_out_no_other() -> None:
    having = Policy(tiers=["bulk", "rare"], limits={"bulk": "5/minute", "rare": "5/minute"})
    course = [default("rare", "3/minute"), *(default("bulk", f"{n % 7 + 1}/minute") for n in range(KEPT + 5))]
    compacted = condense(Policy(), course)
    assert len(compacted) == KEPT + 1
    assert effective(having, compacted).limits == effective(having, course).limits


def condense_rows(given: Sequence[Edit]) -> list[Edit]:
    return condense(POLICY, given)


def test_a_log_keeps_the_newest_changes_and_the_effect_of_all(log: ChangeLog) -> None:
    position, written = 0, []
    for number in range(30):
        change = Change(
            (exemption(f"agent-{number}"), default("heavy", f"{number + 1}/hour"))[: 1 + number % 2], "ada", number
        )
        written.append(change)
        position += len(change.edits)
        assert log.write(change) == position
        if number % 7 == 6:
            assert log.compact(5, condense_rows) == 5
    page = log.read()
    assert page.changes == written[-7:]
    assert page.position == position
    assert effective(POLICY, page.edits()) == effective(POLICY, [edit for change in written for edit in change.edits])
    assert log.compact(7, condense_rows) == 7
    assert log.read() == page
    assert log.compact(100, condense_rows) == 7


@pytest.mark.parametrize("log", ["sqlite", "redis"], indirect=True)
def test_a_reader_continues_at_its_position_or_starts_over(log: ChangeLog) -> None:
    assert (log.read().snapshot, log.read().position) == ((), 0)
    changes = [Change((exemption(f"agent-{number}"), default("light", "1/s")), "ada", number) for number in range(10)]
    positions = [log.write(change) for change in changes]
    for number, position in enumerate(positions):
        page = log.read(position)
        assert (page.snapshot, page.changes, page.position) == (None, changes[number + 1 :], 20)
    log.compact(4, condense_rows)
    for number, position in enumerate(positions):
        page = log.read(position)
        assert page.position == 20
        if number < 5:
            assert page.snapshot
            assert page.changes == changes[-4:]
        else:
            assert (page.snapshot, page.changes) == (None, changes[number + 1 :])


@pytest.mark.parametrize("log", ["sqlite", "redis"], indirect=True)
def test_reading_is_consistent_while_another_writes_and_compacts(log: ChangeLog) -> None:
    done = threading.Event()

    def write() -> None:
        try:
            for number in range(300):
                log.write(
                    Change(
                        (
                            override(f"agent-{number % 9}", "heavy", f"{number + 1}/hour"),
                            default("heavy", f"{number + 1}/s"),
                        )
                    )
                )
                if number % 3 == 0:
                    log.compact(4, condense_rows)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    position, known = 0, effective(POLICY)
    while True:
        last = done.is_set()
        page = log.read(position)
        known = apply_edits(known if page.snapshot is None else effective(POLICY), POLICY, page.edits())
        position = page.position
        assert known.generations.get(("ws", "heavy"), 0) == position // 2
        if last:
            break
    thread.join()
    assert (position, known) == (600, effective(POLICY, log.read().edits()))


@pytest.mark.parametrize("log", ["redis"], indirect=True)
def test_only_one_of_two_concurrent_compactions_takes_effect(log: ChangeLog) -> None:
    written = [exemption(f"agent-{number}") for number in range(20)]
    for edit in written:
        log.write(Change((edit,)))
    once: list[Edit] = []

    def slowly(given: Sequence[Edit]) -> list[Edit]:
        if not once:
            once.extend(given)
            log.compact(8, condense_rows)
        return condense_rows(given)

    log.compact(5, slowly)
    page = log.read()
    assert (page.edits(), page.position) == (written, 20)


# More than 10,000 changes ---------------------------------------------------------------------------------------------


def check_compacted(make: Callable[[], Gate], rows: list[tuple[Any, ...]]) -> Gate:
    """A gate on a log of the first version: it compacts the log with its next change, and nothing else changes."""
    gate = make()
    assert gate.effective == applied(rows)
    assert gate.history() == as_changes(rows)
    gate.add_exemption("last", by="ada")
    expected = applied([*rows, ("exemption", "last", "", "", "exempt")])
    history = gate.history()
    assert len(history) == KEPT
    assert history[:-1] == as_changes(rows[len(rows) - KEPT + 1 :])
    assert (str(history[-1]), history[-1].by) == ("exemption of 'last' set to exempt", "ada")
    again = make()
    for one in (gate, again):
        assert one.effective == expected
        assert one.history() == history
        assert not one.is_exempt("filed")
    again.change([exemption("more"), default("heavy", "3/s")])
    assert len(again.history()) == KEPT + 1, "it is compacted now and then, not each time"
    gate.close()
    return again


@pytest.mark.long
def test_an_old_file_of_more_than_10_000_changes_is_compacted(tmp_path: Path) -> None:
    path, rows = tmp_path / "headgate.db", old_rows(11_500)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(OLD_SCHEMA)
        file.execute("PRAGMA user_version=1")
        file.executemany(f"INSERT INTO changes ({OLD_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    gate = check_compacted(lambda: Gate(POLICY, remember=path), rows)
    gate.close()
    with closing(sqlite3.connect(path)) as file:  # as the first version reads and writes it
        found = file.execute(f"SELECT {OLD_COLUMNS} FROM changes ORDER BY number").fetchall()
        assert without_generations(applied(found)) == without_generations(gate.effective)
        assert len(found) < KEPT + 3100
        with file:
            file.execute(f"INSERT INTO changes ({OLD_COLUMNS}) VALUES ('exemption', 'old', '', '', 'exempt', '', 2.0)")
    with Gate(POLICY, remember=path) as again:
        assert again.is_exempt("old")
        assert len(again.history()) == KEPT + 2


@pytest.mark.long
def test_an_old_list_of_more_than_10_000_changes_is_compacted(redis_server: ValkeyServer, tmp_path: Path) -> None:
    prefix, rows = f"old-{tmp_path.name}:", old_rows(11_500)
    key = f"{prefix[:-1]}-admin:changes"
    texts = [json.dumps(dict(zip(OLD_COLUMNS.split(", "), row, strict=True))) for row in rows]
    stores: list[RedisStore] = []

    def make() -> Gate:
        stores.append(RedisStore(redis_server.url, prefix=prefix, timeout=PATIENCE, clock=ManualClock(start=1000)))
        return Gate(POLICY, store=stores[-1])

    with redis_server.client() as client:
        client.rpush(key, *texts)
        bystander = make()  # which only listens
        gate = check_compacted(make, rows)
        wait_for(lambda: bystander.effective == gate.effective, "the other node")
        found = [json.loads(text) for text in client.lrange(key, 0, -1)]
        assert found[0] == {"kind": "snapshot", "position": 1501, "rows": len(found) - KEPT - 2}
        old = [
            tuple(row.get(name, "" if name != "value" else None) for name in OLD_COLUMNS.split(", ")) for row in found
        ]
        old[0] = ("override", *old[0][1:])  # so the first version takes a kind that it doesn't know
        assert without_generations(applied(old)) == without_generations(gate.effective)
        assert len(found) < KEPT + 3100
        assert client.ttl(key) == -1
        newer = {"kind": "exemption", "agent": "old", "value": "exempt", "at": 2.0}
        client.rpush(key, json.dumps(newer))
        client.publish(key, "1")
        wait_for(lambda: bystander.is_exempt("old") and gate.is_exempt("old"), "a change of the first version")
    for one in (bystander, gate):
        one.close()
    for store in stores:
        store.close()


@pytest.mark.long
def test_the_history_in_memory_is_bounded_too() -> None:
    gate = Gate()
    for number in range(KEPT + 1500):
        gate.set_override(f"agent-{number % 10}", "heavy", f"{number + 1}/hour", by=str(number))
    history = gate.history()
    assert KEPT <= len(history) < KEPT + 1000
    assert [change.by for change in history[-KEPT:]] == [str(number) for number in range(1500, KEPT + 1500)]
    assert gate.capacity("agent-9", "ws", "heavy") == KEPT + 1500


# A shared log that others write to, or that a server loses ------------------------------------------------------------


@pytest.fixture
def opened(redis_server: ValkeyServer, tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    """Makes gates that share a log, and closes them."""
    with ExitStack() as stack:

        def opened() -> Gate:
            store = RedisStore(redis_server.url, prefix=f"lost-{tmp_path.name}:", timeout=PATIENCE)
            return stack.enter_context(Gate(store=stack.enter_context(store)))

        yield opened


def drop_newest_rows(server: ValkeyServer, tmp_path: Path, rows: int) -> None:
    """Drop the newest rows and everybody's connection, as a failover does."""
    with server.client() as client:
        client.ltrim(f"lost-{tmp_path.name}-admin:changes", 0, -1 - rows)
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


@pytest.mark.parametrize("lost", [2, 5])
def test_a_gate_agrees_with_the_log_after_the_server_has_lost_changes(
    opened: Callable[[], Gate], redis_server: ValkeyServer, tmp_path: Path, lost: int
) -> None:
    gate = opened()
    for number in range(5):
        gate.set_override(f"old-{number}", "heavy", "1/minute")
    drop_newest_rows(redis_server, tmp_path, lost)
    other = opened()
    for number in range(lost + 1):
        other.set_override(f"new-{number}", "heavy", "2/minute")
    wait_for(lambda: gate.effective == other.effective, "both gates to agree")


def test_changes_are_announced_once_even_if_the_log_is_read_again(
    opened: Callable[[], Gate], redis_server: ValkeyServer, tmp_path: Path
) -> None:
    gate, heard = opened(), list[str]()
    for number in range(20):
        gate.add_exemption(f"agent-{number}")
    gate.subscribe(lambda event: heard.append(str(event)), PolicyChanged)
    drop_newest_rows(redis_server, tmp_path, 1)
    wait_for(lambda: not gate.is_exempt("agent-19"), "the lost change to be gone")
    assert heard == [str(PolicyChanged("changes read again", ""))]


def test_a_reload_announces_the_changes_that_it_finds(opened: Callable[[], Gate]) -> None:
    gate, other, heard = opened(), opened(), list[str]()
    gate._log.close()  # it no longer follows
    gate.subscribe(lambda event: heard.append(str(event)), PolicyChanged)
    other.add_exemption("a", by="ada")
    gate.reload(Policy())
    made = [PolicyChanged("exemption of 'a' set to exempt", "ada"), PolicyChanged("policy reloaded", "")]
    assert heard == [str(event) for event in made]


# Edits that no function made ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "edits",
    [
        override("a", "heavy", "1/minute"),
        "abc",
        [None],
        5,
        [Edit("bogus", "a", "", "heavy", "1/minute")],
        [Edit("snapshot")],
        [Edit("override", "a", "", "hevy", "1/minute")],
        [Edit("override", "", "", "heavy", "1/minute")],
        [Edit("override", "a\n", "", "heavy", "1/minute")],
        [Edit("override", "a", "", "heavy", "garbage")],
        [Edit("override", "a", "ws", "heavy", None)],
        [Edit("default", "", "", "heavy", "1/minute", generation=3)],
        [Edit("default", "a", "", "heavy", "1/minute")],
        [Edit("exemption", "a", value="5")],
        [Edit("exemption", "a", "ws", value="exempt")],
        [override("a", "heavy", "1/minute"), Edit("override", "b", "", "heavy", "garbage")],
    ],
    ids=repr,
)
def test_invalid_edits_are_refused_and_change_nothing(edits: Any) -> None:
    gate = Gate()
    with pytest.raises(InvalidInput):
        gate.change(edits)
    assert gate.history() == []
    assert gate.effective == Gate().effective
