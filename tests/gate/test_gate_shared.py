"""Gates of several nodes on one server: a change on one applies to all."""

import asyncio
import json
import logging
import select
import subprocess
import sys
from itertools import count
from typing import Any

import pytest

from headgate import Gate, ManualClock, Outcome, Policy, RedisStore
from headgate.errors import StoreAway
from headgate.events import Alerted, Degraded, Event, PolicyChanged
from headgate.gate.changes import default, exemption, override
from headgate.stores.redis.changelog import RedisChangeLog
from tests.support.agents import check_until_denied
from tests.support.lookups import count_lookups
from tests.support.valkey import DURABLE, PATIENCE, ValkeyServer, wait_for

_numbers = count()


class Nodes:
    """Gates that share a server, and a clock."""

    def __init__(self, server: ValkeyServer, policy: Policy | None = None, **options: Any) -> None:
        self.clock = ManualClock(start=1000)
        self.prefix = f"shared{next(_numbers)}:"
        self._server, self._policy, self._options = server, policy, {"timeout": PATIENCE, **options}
        self.gates: list[Gate] = []
        self._stores: list[RedisStore] = []
        self.events: list[list[Event]] = []

    def start(self) -> Gate:
        store = RedisStore(self._server.url, prefix=self.prefix, clock=self.clock, **self._options)
        self._stores.append(store)
        gate = Gate(self._policy, store=store)
        self.gates.append(gate)
        self.events.append([])
        gate.subscribe(self.events[-1].append)
        return gate

    def __enter__(self) -> tuple["Nodes", Gate, Gate]:
        return self, self.start(), self.start()

    def __exit__(self, *_: object) -> None:
        for gate in self.gates:
            gate.close()
        for store in self._stores:
            store.close()


def test_a_store_may_be_closed_before_its_gate(server: ValkeyServer, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(20):  # each may close the connection while the gate's thread waits for a message on it
        store = RedisStore(server.url, prefix=f"closed{number}:", timeout=PATIENCE)
        gate = Gate(store=store)
        assert gate.check("a", "ws", "light")
        store.close()
        gate.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_change_log_whose_client_is_closed_meanwhile_has_lost_its_connection(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """redis-py raises a TypeError then: its socket is gone when it is to wait for it."""
    with RedisStore(server.url) as store:

        class Closed:
            def eval(self, *_: object) -> None:
                select.poll().register(None)  # type: ignore[arg-type]

        monkeypatch.setattr(store._clients, "client", Closed)
        with pytest.raises(StoreAway, match=r"^the changes can't be read: TypeError: argument must be an int"):
            store.change_log().read()


def test_a7_nodes_count_together_and_violations_are_shared(server: ValkeyServer) -> None:
    with Nodes(server) as (_, one, other):
        decisions = [gate.check("a", "ws", "heavy") for _ in range(8) for gate in (one, other)]
        assert [bool(decision) for decision in decisions] == [True] * 10 + [False] * 6
        counts = [decision.violation.count for decision in decisions[10:] if decision.violation is not None]
        assert counts == [1, 2, 3, 4, 5, 6]
        assert one.standing("a").violations == other.standing("a").violations == 6
        assert one.is_rate_limited("a")
        assert other.reset_violations("a")
        assert not one.is_rate_limited("a")


def test_one_alert_for_the_fleet(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, other):
        check_until_denied(one, "a", "ws", "heavy")
        for _ in range(10):
            one.check("a", "ws", "heavy")
            other.check("a", "ws", "heavy")
        assert sum(isinstance(event, Alerted) for events in nodes.events for event in events) == 1


def test_a11_a_change_applies_to_every_node_and_drops_the_buckets_once(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, other):
        for gate in (one, other):
            gate.check("a", "ws", "heavy", cost=5)
        one.set_override("a", "heavy", "4/minute", by="root")
        assert one.check("a", "ws", "heavy").remaining == 3
        wait_for(lambda: other.capacity("a", "ws", "heavy") == 4, "the override")
        assert other.check("a", "ws", "heavy").remaining == 2
        assert one.check("a", "ws", "heavy").remaining == 1
        other.remove_override("a")
        wait_for(lambda: one.capacity("a", "ws", "heavy") == 10, "the default")
        assert one.check("a", "ws", "heavy").remaining == 9
        assert other.check("a", "ws", "heavy").remaining == 8
        one.add_exemption("vip")
        wait_for(lambda: other.is_exempt("vip"), "the exemption")
        assert other.check("vip", "ws", "heavy").outcome is Outcome.EXEMPT
        heard = [event.what for event in nodes.events[1] if isinstance(event, PolicyChanged)]
        assert heard == [
            "override of 'a' for heavy set to 4/minute",
            "override of 'a' removed",
            "exemption of 'vip' set to exempt",
        ]
        assert [change.by for change in one.history()] == [change.by for change in other.history()] == ["root", "", ""]


def test_a11_a_changed_default_drops_the_buckets_of_the_tier_once_for_all_nodes(server: ValkeyServer) -> None:
    with Nodes(server) as (_, one, other):
        for limit, left in (("20/minute", 19), ("10/minute", 9), ("20/minute", 19)):
            for gate in (one, other):
                gate.check("a", "ws", "heavy", cost=2)
            one.set_default("heavy", limit)
            wait_for(lambda limit=limit: str(other.limits_for("a", "ws", "heavy")) == limit, "the default")  # type: ignore[misc]
            assert one.check("a", "ws", "heavy").remaining == left
            assert other.check("a", "ws", "heavy").remaining == left - 1
            assert one.check("b", "ws", "heavy").remaining == left


def test_a_node_that_starts_later_applies_earlier_changes(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, _):
        one.set_override("a", "light", "7/minute", channel="http")
        one.add_exemption("vip")
        late = nodes.start()
        assert (late.capacity("a", "http", "light"), late.capacity("a", "ws", "light")) == (7, 120)
        assert late.is_exempt("vip")


def test_a_node_without_a_tier_skips_changes_to_it_until_it_has_the_tier(server: ValkeyServer) -> None:
    more = Policy(tiers=["bulk"], limits={"bulk": "5/minute"})
    with Nodes(server) as (nodes, one, other):
        one.reload(more)
        assert one.check("a", "ws", "bulk").remaining == 4
        one.change([override("a", "bulk", "8/minute"), default("bulk", "6/minute"), exemption("vip")])
        wait_for(lambda: other.is_exempt("vip"), "the rest of the change")
        assert (other.effective.overrides, other.policy.tiers) == ({}, ("light", "normal", "heavy"))
        assert nodes.start().check("a", "ws", "heavy").remaining == 9, "a node that starts without the tier"
        other.set_override("b", "heavy", "3/minute")
        wait_for(lambda: one.capacity("b", "ws", "heavy") == 3, "a change of the node without the tier")
        other.reload(more)
        assert (other.capacity("a", "ws", "bulk"), other.capacity("b", "ws", "bulk")) == (8, 6)
        assert [gate.check("b", "ws", "bulk").remaining for gate in (one, other)] == [5, 4], "counted together"


def test_concurrent_changes_of_several_nodes_have_the_same_effect_everywhere(server: ValkeyServer) -> None:
    async def change(gate: Gate, number: int) -> None:
        for step in range(10):
            await gate.aset_override(f"agent-{step % 3}", "heavy", f"{number * 10 + step + 1}/minute")

    async def all_at_once(*gates: Gate) -> None:
        await asyncio.gather(*[change(gate, number) for number, gate in enumerate(gates)])

    with Nodes(server) as (_, one, other):
        asyncio.run(all_at_once(one, other))
        wait_for(lambda: one.effective == other.effective, "both to hold the same")
        assert len(one.history()) == 20


def test_changes_are_read_again_after_a_lost_connection(server: ValkeyServer) -> None:
    with Nodes(server) as (_, one, other), server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        one.set_override("a", "heavy", "3/minute")
        wait_for(lambda: other.capacity("a", "ws", "heavy") == 3, "the override, heard of or read")


FORK = """
import os, sys, time
from headgate import Gate, Limiter, ManualClock, Policy, RedisStore, per_day

patience = float(sys.argv[2])
gate = Gate(Policy(store={"timeout": patience}), store=sys.argv[1])
store = RedisStore(sys.argv[1], draw_ahead=0.5, prefix="forked:", timeout=patience, clock=ManualClock(start=1000))
limiter = Limiter(per_day(1000), store=store)
assert all(limiter.check("a") for _ in range(10))  # some tokens are drawn ahead, by the parent alone
child = os.fork()
if child == 0:
    passed = sum(bool(limiter.check("a")) for _ in range(2000))
    deadline = time.monotonic() + patience
    while gate.capacity("a", "ws", "heavy") != 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    print(passed, gate.capacity("a", "ws", "heavy"), gate.check("a", "ws", "light").degraded, flush=True)
    os._exit(0)
gate.set_override("a", "heavy", "3/minute")
passed = sum(bool(limiter.check("a")) for _ in range(2000))
os.waitpid(child, 0)
print(passed)
gate.close()
store.close()
"""


@pytest.mark.long
def test_a_forked_process_counts_and_follows_changes_by_itself(server: ValkeyServer) -> None:
    """As in a server that loads an application before it forks its workers."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, server.url, str(PATIENCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    (child, capacity, degraded), (parent,) = (line.split() for line in done.stdout.splitlines())
    assert (capacity, degraded) == ("3", "False")
    assert int(child) + int(parent) == 990


FORK_IN_A_CHANGE = """
import os, signal, threading
from headgate import Gate
from headgate.gate.change_log import MemoryChangeLog

class Slow(MemoryChangeLog):
    def write(self, change):
        writing.set()
        go_on.wait()
        return super().write(change)

writing, go_on = threading.Event(), threading.Event()
gate = Gate(remember=Slow())
thread = threading.Thread(target=gate.add_exemption, args=("a",))
thread.start()
writing.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # rather than hang for ever
    go_on = threading.Event()  # the parent's may be just being waited for
    go_on.set()
    gate.add_exemption("b")
    print(sorted(gate.effective.exempt), flush=True)
    os._exit(0)
go_on.set()
thread.join()
print(sorted(gate.effective.exempt), os.waitpid(child, 0)[1])
"""


def test_a_process_forked_in_the_middle_of_a_change_accepts_changes() -> None:
    """The thread that makes the change is the parent's, and so is its lock."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK_IN_A_CHANGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    assert sorted(done.stdout.splitlines()) == ["['a'] 0", "['b']"]


def test_c5_changes_of_an_admin_have_no_expiry_and_a_prefix_of_their_own(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, _), server.client() as client:
        one.set_default("heavy", "5/minute", by="root")
        one.check("a", "ws", "heavy")
        key = f"{nodes.prefix[:-1]}-admin:changes"
        assert client.ttl(key) == -1
        (row,) = client.lrange(key, 0, -1)
        assert {name: value for name, value in json.loads(row).items() if name != "at"} == {
            "kind": "default", "agent": "", "channel": "", "tier": "heavy", "value": "5/minute", "by": "root",
        }  # fmt: skip
        counting = client.keys(f"{nodes.prefix}*")
        assert counting
        assert all(client.pttl(name) > 0 for name in counting)


def test_several_edits_are_one_change_on_every_node(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, other), server.client() as client:
        one.change(
            [default("heavy", "5/minute", "ws"), exemption("vip"), override("a", "light", "7/minute")], by="root"
        )
        wait_for(lambda: other.effective == one.effective, "the change")
        assert other.history() == one.history()
        assert [len(change.edits) for change in one.history()] == [3]
        for events in nodes.events:
            wait_for(lambda events=events: len(events) == 1, "the event")  # type: ignore[misc]
        rows = [json.loads(row) for row in client.lrange(f"{nodes.prefix[:-1]}-admin:changes", 0, -1)]
        assert [(row["kind"], row["by"], row.get("more")) for row in rows] == [
            ("default", "root", True), ("exemption", "root", True), ("override", "root", None),
        ]  # fmt: skip


def test_a_node_does_not_read_its_own_change_again(server: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with Nodes(server) as (_, one, other):
        one.set_override("a", "heavy", "3/minute")
        wait_for(lambda: other.effective == one.effective, "the change")
        built = count_lookups(monkeypatch)
        one.set_override("b", "heavy", "3/minute")
        wait_for(lambda: other.effective == one.effective, "the change")
        assert sorted(map(id, built)) == sorted(map(id, (one._lookup, other._lookup)))


def test_a_change_written_by_a_newer_node_is_understood(server: ValkeyServer) -> None:
    with Nodes(server) as (nodes, one, _), server.client() as client:
        newer = {"kind": "override", "agent": "a", "tier": "heavy", "value": "2/minute", "reason": "flood", "at": 1.0}
        key = f"{nodes.prefix[:-1]}-admin:changes"
        client.rpush(key, json.dumps({"kind": "holiday", "agent": "a", "at": 1.0}), json.dumps(newer))
        client.publish(f"{nodes.prefix[:-1]}-admin:changes", "1")
        wait_for(lambda: one.capacity("a", "ws", "heavy") == 2, "the override")


def test_a_reload_on_one_node_keeps_the_counts_of_the_other(server: ValkeyServer) -> None:
    with Nodes(server) as (_, one, other):
        policy = Policy(limits={"heavy": "20/minute"})
        one.reload(policy)
        assert one.check("a", "ws", "heavy", cost=15).remaining == 5
        other.reload(policy)
        assert other.check("a", "ws", "heavy").remaining == 4


def test_a_change_first_read_by_a_reload_is_still_an_event(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RedisChangeLog, "follow", lambda *_: None)  # as if the notification were late
    with Nodes(server) as (nodes, one, other):
        one.set_default("heavy", "20/minute")
        one.set_default("heavy", "10/minute")
        other.reload(Policy())
        other.change([exemption("vip")])
        assert [event.what for event in nodes.events[1] if isinstance(event, PolicyChanged)] == [
            "default for heavy set to 20/minute",
            "default for heavy set to 10/minute",
            "policy reloaded",
            "exemption of 'vip' set to exempt",
        ]
        assert other.effective.generations == one.effective.generations


def test_outages_of_the_store_are_events() -> None:
    with ValkeyServer() as server, Nodes(server, Policy(store={"nodes": 2}), nodes=2) as (nodes, one, _):
        assert not one.check("a", "ws", "heavy").degraded
        server.kill()
        decisions = [one.check("a", "ws", "heavy") for _ in range(7)]
        assert all(decision.degraded for decision in decisions)
        assert [bool(decision) for decision in decisions] == [True] * 5 + [False] * 2  # half of ten
        assert decisions[0].limit == one.limits_for("a", "ws", "heavy")
        with one.session("a", 1, "1/minute") as session:
            assert session.check().degraded
        server.start()
        wait_for(lambda: not one.check("b", "ws", "light").degraded, "the server")
        heard = [event.degraded for event in nodes.events[0] if isinstance(event, Degraded)]
        assert heard == [True, False]


def test_a_gate_that_starts_without_the_server_applies_the_changes_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ValkeyServer(*DURABLE) as server, Nodes(server) as (nodes, one, _):
        one.add_exemption("vip")
        server.kill()
        with caplog.at_level(logging.ERROR):
            late = nodes.start()
        assert "starting without the changes made while running" in caplog.text
        assert not late.is_exempt("vip")
        server.start()
        wait_for(lambda: late.is_exempt("vip"), "the changes")


def test_f1_accounts_are_changed_on_every_node_and_settled_on_any(server: ValkeyServer) -> None:
    policy = Policy(accounts={"default": {"team": {"usd": "1 in all"}}})
    with Nodes(server, policy) as (nodes, one, other):
        one.set_agent_account("planner", "acme/search", by="ada")
        one.set_account_limit("acme/search", "usd", "5 in all", by="ada")
        wait_for(lambda: "acme/search" in other.effective.accounts.at, "the other node to know the account")
        assert other.hold("planner", {"usd": 4}, hold_id="x")
        assert not one.hold("planner", {"usd": 2})
        one.find_hold("planner", "x").settle({"usd": 1})
        assert one.hold("planner", {"usd": 4})
        later = nodes.start()
        assert [str(limit.left) for limit in later.account("acme/search").limits] == ["0.000000"]
        assert [change.by for change in later.history()] == ["ada", "ada"]


def test_f1_nodes_grant_exactly_what_fits(server: ValkeyServer) -> None:
    policy = Policy(
        accounts={"at": {"acme": {"usd": "10 in all"}}, "default": {"agent": {"slots": "3 in flight"}}},
        agents={f"agent-{number}": {"account": "acme"} for number in range(8)},
    )

    async def hold_on(gate: Gate) -> int:
        holds = await asyncio.gather(*[gate.ahold(f"agent-{n % 8}", {"usd": "0.6"}) for n in range(40)])
        return sum(map(bool, holds))

    async def hold_on_all(gates: list[Gate]) -> list[int]:
        return await asyncio.gather(*[hold_on(gate) for gate in gates])

    with Nodes(server, policy) as (nodes, one, _):
        granted = asyncio.run(hold_on_all(nodes.gates))
        assert sum(granted) == 16  # 9.6 of 10; of each agent at most three at once
        assert [str(limit.held) for limit in one.account("acme").limits] == ["9.600000"]
