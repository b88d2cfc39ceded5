"""Holds of a gate that wait: whom they wait for, and under which rules they are decided."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from headgate import Decision, Gate, InvalidInput, ManualClock, MemoryStore, Outcome, Policy, RedisStore
from headgate.gate.account_holds import AccountHold
from headgate.stores.base import Ask
from headgate.stores.holds import HoldAnswer, HoldTerms
from tests.support.event_loop import wait_until
from tests.support.valkey import PATIENCE, ValkeyServer

ACCOUNTS: dict[str, Any] = {
    "default": {
        "agent": {"slots": "2 in flight", "usd": "10/calendar day"},
        "session": {"slots": "1 in flight"},
    }
}
LINE = "-/-/planner\n\t\t"
"""The line of the planner without a session."""
LATER = 0.25  # seconds until a hold that waits looks again


class WaitingLine:
    """A gate, and an agent with a hold that waits for a slot."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock(1000)
        self.gate = Gate(Policy(accounts=ACCOUNTS, **settings), store=MemoryStore(clock=self.clock))
        self.first = self.gate.hold("planner", {}, session="one")

    async def wait(self, **options: Any) -> asyncio.Future[AccountHold]:
        """A hold that waits."""
        settings = {"session": "one", "timeout": 30, **options}
        waiting = asyncio.ensure_future(self.gate.ahold("planner", {"usd": 5}, **settings))
        await wait_until(lambda: self.gate._hold_queues.queues, "the hold to wait")
        await asyncio.sleep(0)
        return waiting


async def test_f1_a_hold_that_waits_keeps_no_other_session_waiting() -> None:
    line = WaitingLine()
    waiting = await line.wait()
    other = await asyncio.wait_for(line.gate.ahold("planner", {}, session="two", timeout=30), 10)
    assert other
    await other.asettle()
    assert not waiting.done()
    await line.first.asettle()
    assert (await asyncio.wait_for(waiting, 10)).state == "open"


async def test_f1_whatever_an_agent_settles_wakes_all_of_its_lines() -> None:
    line = WaitingLine()
    second = line.gate.hold("planner", {}, session="two")  # all slots of the agent
    waiting = await line.wait(session="three")
    await second.asettle()  # the clock stands still: nothing else could wake it
    assert (await asyncio.wait_for(waiting, 10)).state == "open"


@pytest.mark.parametrize("settings", [{"exempt": ["planner"]}, {"shadow": True}], ids=["exempt", "shadow"])
def test_f1_an_agent_that_is_never_denied_never_waits(settings: dict[str, Any]) -> None:
    line = WaitingLine(**settings)
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
async def test_f1_a_hold_that_waits_is_decided_by_the_rules_of_when_its_turn_comes(
    change: Change, state: str, reload: bool
) -> None:
    line = WaitingLine()
    waiting = await line.wait()
    change(line.gate)
    if reload:
        line.gate.reload(line.gate.policy)
    line.clock.advance(LATER)
    assert (await asyncio.wait_for(waiting, 10)).state == state


async def test_f1_a_budget_that_is_lowered_denies_the_hold_that_waits() -> None:
    line = WaitingLine()
    waiting = await line.wait(timeout=1)
    line.gate.set_account_limit("-/-/planner", "usd", "2/calendar day")
    await line.first.asettle()
    line.clock.advance(1)
    hold = await asyncio.wait_for(waiting, 10)
    assert (hold.state, str(hold.bound)) == ("denied", "usd of -/-/planner")


async def test_f1_a_hold_in_a_thread_is_decided_by_the_rules_of_when_its_turn_comes() -> None:
    line = WaitingLine()
    holding = asyncio.to_thread(line.gate.hold, "planner", {}, session="one", timeout=30)
    waiting = asyncio.ensure_future(holding)
    await wait_until(lambda: line.gate._hold_queues.queues, "the hold to wait")
    line.gate.block("planner")
    await line.first.asettle()
    assert (await asyncio.wait_for(waiting, 10)).state == "denied"


async def slot_order(*agents: str) -> list[str]:
    """Agents in the order in which they get the slot of their account. All wait for it, and the clock stands still."""
    accounts = {"at": {"acme": {"slots": "1 in flight"}}}
    policy = Policy(accounts=accounts, agents={agent: {"account": "acme"} for agent in agents})
    gate = Gate(policy, store=MemoryStore(clock=ManualClock(1000)))
    order: list[str] = []

    async def hold(agent: str) -> None:
        async with gate.ahold(agent, {}, timeout=3600):
            order.append(agent)

    first = gate.hold(agents[0], {})
    waiting = [asyncio.create_task(hold(agent)) for agent in agents]
    await wait_until(lambda: len(gate._hold_queues.queues) == len(set(agents)), "all to wait")
    await first.asettle()
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert not gate._hold_queues.queues
    assert not gate._hold_queues._groups
    return order


async def test_f1_an_agent_is_not_starved_by_the_line_of_another_under_the_same_account() -> None:
    """What comes back wakes up the line that was served longest ago first."""
    order = await slot_order("busy", "busy", "busy", "planner")
    assert order.index("planner") < 3  # not after all the others, who may have been awake already


async def test_f1_however_many_lines_there_are_a_settlement_wakes_a_few_and_each_has_its_turn() -> None:
    agents = [f"agent-{i}" for i in range(40)]
    assert sorted(await slot_order(*agents)) == sorted(agents)


async def test_f1_a_hold_waits_until_its_enforced_wait_is_over() -> None:
    line = WaitingLine(backoff={"enforce": True})
    assert not line.gate.hold("planner", {}, session="one")  # a violation: 1 second
    await line.first.asettle()
    waiting = await line.wait()
    line.clock.advance(0.75)
    await wait_until(lambda: line.clock._alarms, "the hold to look again")
    assert not waiting.done()
    line.clock.advance(0.25)
    assert (await asyncio.wait_for(waiting, 10)).state == "open"
    assert line.gate.standing("planner").violations == 1


async def test_f1_a_hold_waits_no_longer_for_an_enforced_wait_that_is_not_enforced_any_more() -> None:
    line = WaitingLine(backoff={"enforce": True, "steps": [60]})
    assert not line.gate.hold("planner", {}, session="one")  # a violation: 60 seconds
    waiting = await line.wait()
    await line.first.asettle()
    line.gate.reload(Policy(accounts=ACCOUNTS, backoff={"steps": [60]}))
    line.clock.advance(LATER)
    assert (await asyncio.wait_for(waiting, 5)).state == "open"


async def test_f1_a_hold_that_only_others_keep_waiting_is_no_violation() -> None:
    clock = ManualClock(1000)
    gate = Gate(Policy(accounts={"default": {"agent": {"tokens": "60/minute"}}}), store=MemoryStore(clock=clock))
    gate.hold("planner", {"tokens": 30})
    large = asyncio.ensure_future(gate.ahold("planner", {"tokens": 60}, timeout=20))
    await wait_until(lambda: gate._hold_queues.queues, "the large one to wait")
    small = asyncio.ensure_future(gate.ahold("planner", {"tokens": 1}, timeout=1))
    await asyncio.sleep(0)
    clock.advance(1)
    denied = await asyncio.wait_for(small, 10)
    assert not denied
    assert denied.decision.violation is None
    assert not gate.is_rate_limited("planner")
    large.cancel()
    await asyncio.wait((large,))


def start_hold(gate: Gate, thread: bool, costs: dict[str, int], **options: Any) -> asyncio.Future[AccountHold]:
    """A hold of the planner that a task waits for, or a thread."""
    return asyncio.ensure_future(
        asyncio.to_thread(gate.hold, "planner", costs, **options) if thread else gate.ahold("planner", costs, **options)
    )


@pytest.mark.parametrize("thread", [False, True], ids=["task", "thread"])
@pytest.mark.parametrize("blocked", [False, True], ids=["enforced wait", "block"])
async def test_f1_a_hold_whose_turn_never_comes_is_told_of_an_enforced_wait_or_a_block(
    blocked: bool, thread: bool
) -> None:
    """Of what denies it on its own turn: it isn't the others that keep it waiting."""
    clock = ManualClock(1000)
    policy = Policy(backoff={"enforce": True, "steps": [60]}, accounts={"default": {"agent": {"tokens": "60/minute"}}})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    gate.hold("planner", {"tokens": 30})
    if not blocked:
        assert not gate.hold("planner", {"tokens": 60})
    first = start_hold(gate, thread, {"tokens": 60}, timeout=120)
    await wait_until(lambda: gate._hold_queues.length(LINE) == 1, "the first")
    second = start_hold(gate, thread, {"tokens": 1}, timeout=0.1)
    await wait_until(lambda: gate._hold_queues.length(LINE) == 2, "the second")
    if blocked:
        gate.block("planner")
    clock.advance(0.1)
    hold = await asyncio.wait_for(second, 10)
    gate.block("planner")  # so that the first leaves, too
    clock.advance(0.25)
    await asyncio.wait_for(first, 10)
    assert (hold.state, hold.bound, hold.decision.retry_after) == ("denied", None, None if blocked else 60)
    assert hold.decision.violation is not None


@pytest.mark.parametrize("thread", [False, True], ids=["task", "thread"])
async def test_f1_an_id_is_held_once_though_its_agent_moves_while_it_waits(thread: bool) -> None:
    accounts = {"default": {"agent": {"slots": "1 in flight", "usd": "10/calendar day"}}}
    clock = ManualClock(1000)
    policy = Policy(accounts=accounts, agents={"planner": {"account": "acme"}})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    gate.hold("planner", {})
    options: dict[str, Any] = {"hold_id": "job", "timeout": 30}
    waiting = start_hold(gate, thread, {"usd": 5}, **options)
    await wait_until(lambda: gate._hold_queues.queues, "the hold to wait")
    gate.set_account_limit("acme/-/planner", "slots", "2 in flight")
    assert gate.hold("planner", {"usd": 5}, hold_id="job")  # repeated, and granted first
    gate.set_agent_account("planner", "globex")
    clock.advance(LATER)
    found = await asyncio.wait_for(waiting, 10)
    assert (found.account, found.repeated) == ("acme/-/planner", True)
    assert [one.id for one in gate.list_holds("globex")] == []


@pytest.mark.parametrize("thread", [False, True], ids=["task", "thread"])
async def test_f1_a_hold_whose_agent_moves_waits_for_its_new_account(thread: bool) -> None:
    """What comes back there wakes it at once, and nothing of the account before does."""
    clock = ManualClock(1000)
    slots = {"slots": "1 in flight"}
    policy = Policy(
        accounts={"at": {"acme": slots, "globex": slots}},
        agents={"planner": {"account": "acme"}, "first": {"account": "acme"}, "second": {"account": "globex"}},
    )
    gate = Gate(policy, store=MemoryStore(clock=clock))
    gate.hold("first", {})
    second = gate.hold("second", {})
    waiting = start_hold(gate, thread, {}, timeout=10)
    await wait_until(lambda: "acme" in gate._hold_queues._groups, "the hold to wait")
    gate.set_agent_account("planner", "globex")
    clock.advance(LATER)
    await wait_until(lambda: "globex" in gate._hold_queues._groups, "the hold to wait for the other account")
    assert list(gate._hold_queues._groups) == ["globex", "globex/-/planner"]
    await second.asettle()  # the clock stands still: nothing else could wake it
    assert (await asyncio.wait_for(waiting, 10)).account == "globex/-/planner"


@pytest.mark.parametrize("thread", [False, True], ids=["task", "thread"])
async def test_f1_a_hold_whose_agent_moves_waits_no_longer_than_its_timeout(thread: bool) -> None:
    clock = ManualClock(1000)
    policy = Policy(accounts={"default": {"agent": {"slots": "1 in flight"}}}, agents={"planner": {"account": "acme"}})
    gate = Gate(policy, store=MemoryStore(clock=clock))
    gate.hold("planner", {})
    waiting = start_hold(gate, thread, {}, timeout=1)
    await wait_until(lambda: "acme" in gate._hold_queues._groups, "the hold to wait")
    gate.set_agent_account("planner", "globex")
    gate.hold("planner", {})  # its slot there
    clock.advance(LATER)
    await wait_until(lambda: "globex" in gate._hold_queues._groups, "the hold to wait for the other account")
    clock.advance(1 - 2 * LATER)
    await wait_until(lambda: clock._alarms, "the hold to look again")
    assert not waiting.done()
    clock.advance(LATER)
    assert not await asyncio.wait_for(waiting, 10)


@pytest.fixture
def unanswered(redis_server: ValkeyServer) -> Iterator[tuple[Gate, ManualClock]]:
    """A gate whose server makes the first hold, and doesn't answer."""
    clock = ManualClock(1000)
    policy = Policy(accounts={"default": {"agent": {"slots": "1 in flight"}}}, agents={"planner": {"account": "acme"}})
    with RedisStore(redis_server.url, prefix=f"{uuid4().hex}:", timeout=PATIENCE, clock=clock) as store:

        def lost(asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
            made = RedisStore.hold(store, asks, low, terms)
            store.hold, store.ahold = partial(RedisStore.hold, store), partial(RedisStore.ahold, store)  # type: ignore[method-assign]
            assert made.state == "open"
            limit = made.decision.limit
            late = Decision(Outcome.DENY, limit, 0, 250_000, 0, -1).as_degraded(limit)
            return HoldAnswer(late, "denied", made.costs, 0, ())

        async def alost(asks: Sequence[Ask], low: int, terms: HoldTerms) -> HoldAnswer:
            return lost(asks, low, terms)

        store.hold, store.ahold = lost, alost  # type: ignore[method-assign]
        yield Gate(policy, store=store), clock


async def unanswered_hold(gate: Gate, clock: ManualClock, thread: bool = False) -> asyncio.Future[AccountHold]:
    """A hold that the server has made, and whose caller waits since it knows nothing of that."""
    waiting = start_hold(gate, thread, {}, timeout=30)
    await wait_until(lambda: clock._alarms, "the hold to wait")
    assert gate.list_holds("acme")
    return waiting


@pytest.mark.parametrize("thread", [False, True], ids=["task", "thread"])
@pytest.mark.parametrize("change", ["block", "move"])
async def test_f1_a_hold_that_a_server_may_have_made_is_given_back_whatever_denies_it_later(
    unanswered: tuple[Gate, ManualClock], change: str, thread: bool
) -> None:
    gate, clock = unanswered
    waiting = await unanswered_hold(gate, clock, thread)
    if change == "block":
        gate.block("planner")
    else:
        gate.set_agent_account("planner", "globex")
    clock.advance(LATER)
    assert (await asyncio.wait_for(waiting, 10)).state == ("denied" if change == "block" else "open")
    assert gate.list_holds("acme") == []


async def test_f1_a_hold_that_a_server_may_have_made_is_given_back_if_its_caller_gives_up(
    unanswered: tuple[Gate, ManualClock],
) -> None:
    gate, clock = unanswered
    waiting = await unanswered_hold(gate, clock)
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert gate.list_holds("acme") == []


async def test_f1_a_hold_that_a_server_makes_late_is_given_back_though_it_was_denied_meanwhile(
    unanswered: tuple[Gate, ManualClock],
) -> None:
    """What it is sent before it hangs may come after what it is sent later, on another connection."""
    gate, clock = unanswered
    waiting = await unanswered_hold(gate, clock)
    (late,) = gate.list_holds("acme")
    gate.find_hold("planner", late.id).cancel()
    gate.store.reset()  # type: ignore[attr-defined]
    first = gate.hold("planner", {})
    asked = gate._hold_templates().attempt(("planner", {}, None, None, None, late.id, 0, 3600))
    clock.advance(LATER)
    await wait_until(lambda: clock._alarms, "the hold to look again")
    assert not waiting.done()
    first.cancel()
    gate.block("planner")
    assert asked.ask()
    clock.advance(LATER)
    assert (await asyncio.wait_for(waiting, 10)).state == "denied"
    assert gate.list_holds("acme") == []


@pytest.mark.parametrize("timeout", ["soon", -5, float("nan"), True, False])
def test_f1_a_timeout_that_is_none_is_refused_whoever_asks(timeout: Any) -> None:
    line = WaitingLine(exempt=["writer"])
    for agent in ("planner", "writer"):
        with pytest.raises(InvalidInput, match="timeout: expected"):
            line.gate.hold(agent, {}, timeout=timeout)
