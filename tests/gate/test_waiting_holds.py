"""Holds of a gate that wait: whom they wait for, and under which rules they are decided."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.gate.account_holds import AccountHold
from tests.support.event_loop import run, until

ACCOUNTS: dict[str, Any] = {
    "default": {
        "agent": {"slots": "2 in flight", "usd": "10/calendar day"},
        "session": {"slots": "1 in flight"},
    }
}
LATER = 0.25  # seconds until a hold that waits looks again


class Line:
    """A gate, and an agent with a hold that waits for a slot."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock(1000)
        self.gate = Gate(Policy(accounts=ACCOUNTS, **settings), store=MemoryStore(clock=self.clock))
        self.first = self.gate.hold("planner", {}, session="one")

    async def wait(self, **options: Any) -> asyncio.Future[AccountHold]:
        """A hold that waits."""
        settings = {"session": "one", "timeout": 30, **options}
        waiting = asyncio.ensure_future(self.gate.ahold("planner", {"usd": 5}, **settings))
        await until(lambda: self.gate._hold_queues.queues, "the hold to wait")
        await asyncio.sleep(0)
        return waiting


def test_f1_a_hold_that_waits_keeps_no_other_session_waiting() -> None:
    async def check() -> None:
        line = Line()
        waiting = await line.wait()
        other = await asyncio.wait_for(line.gate.ahold("planner", {}, session="two", timeout=30), 10)
        assert other
        await other.asettle()
        assert not waiting.done()
        await line.first.asettle()
        assert (await waiting).state == "open"

    run(check())


def test_f1_whatever_an_agent_settles_wakes_all_of_its_lines() -> None:
    async def check() -> None:
        line = Line()
        second = line.gate.hold("planner", {}, session="two")  # all slots of the agent
        waiting = await line.wait(session="three")
        await second.asettle()  # the clock stands still: nothing else could wake it
        assert (await asyncio.wait_for(waiting, 10)).state == "open"

    run(check())


@pytest.mark.parametrize("settings", [{"exempt": ["planner"]}, {"shadow": True}], ids=["exempt", "shadow"])
def test_f1_an_agent_that_is_never_denied_never_waits(settings: dict[str, Any]) -> None:
    line = Line(**settings)
    assert line.gate.hold("planner", {}, session="one", timeout=30)
    assert not line.gate._hold_queues.queues


Change = Callable[[Gate], object]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (lambda gate: gate.block("planner"), "denied"),
        (lambda gate: gate.add_exemption("planner"), "open"),
        (lambda gate: gate.set_level_limit("session", "slots", "2 in flight"), "open"),
    ],
    ids=["blocked", "exempt", "raised"],
)
@pytest.mark.parametrize("reload", [False, True], ids=["changed", "reloaded"])
def test_f1_a_hold_that_waits_is_decided_by_the_rules_of_when_its_turn_comes(
    change: Change, state: str, reload: bool
) -> None:
    async def check() -> None:
        line = Line()
        waiting = await line.wait()
        change(line.gate)
        if reload:
            line.gate.reload(line.gate.policy)
        line.clock.advance(LATER)
        assert (await asyncio.wait_for(waiting, 10)).state == state

    run(check())


def test_f1_a_budget_that_is_lowered_denies_the_hold_that_waits() -> None:
    async def check() -> None:
        line = Line()
        waiting = await line.wait(timeout=1)
        line.gate.set_account_limit("-/-/planner", "usd", "2/calendar day")
        await line.first.asettle()
        line.clock.advance(1)
        hold = await asyncio.wait_for(waiting, 10)
        assert (hold.state, str(hold.bound)) == ("denied", "usd of -/-/planner")

    run(check())


def test_f1_a_hold_in_a_thread_is_decided_by_the_rules_of_when_its_turn_comes() -> None:
    async def check() -> None:
        line = Line()
        holding = asyncio.to_thread(line.gate.hold, "planner", {}, session="one", timeout=30)
        waiting = asyncio.ensure_future(holding)
        await until(lambda: line.gate._hold_queues.queues, "the hold to wait")
        line.gate.block("planner")
        await line.first.asettle()
        assert (await asyncio.wait_for(waiting, 10)).state == "denied"

    run(check())
