"""Accounts in the dashboard's feed: read in the background within bounds, and sent as they change."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from headgate import Gate, ManualClock, MemoryStore, Policy
from headgate.errors import StoreAway
from headgate.gate.account_status import AccountStatus
from headgate.hub.dashboard import accounts as module
from headgate.hub.dashboard.accounts import AccountReader
from tests.support.account_alerts import PAYS, spend
from tests.support.hub import ADMIN, VIEWER, AgentConnection, HubServer, hub_server
from tests.support.valkey import wait_for


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_INTERVAL", 0.02)


class AccountsDashboard:
    """What a dashboard knows of accounts: the snapshot, with all updates put into it."""

    def __init__(self, wire: AgentConnection, token: str) -> None:
        wire.say("watch", **({"token": token} if token else {}))
        self._wire, self.frames = wire, [wire.hear()]
        self.accounts: dict[str, dict[str, Any]] = {}
        self._take(self.frames[0])

    def _take(self, frame: dict[str, Any]) -> None:
        for path in frame.get("accounts_gone", ()):
            del self.accounts[path]
        self.accounts |= {card["path"]: card for card in frame.get("accounts", ())}

    def follow(self) -> bool:
        frame = self._wire.hear()
        self.frames.append(frame)
        self._take(frame)
        return True

    def wait_until(self, holds: Any, what: str) -> None:
        wait_for(lambda: holds() or (self.follow() and holds()), what)

    def last(self, name: str) -> Any:
        return [frame[name] for frame in self.frames if name in frame][-1]


@contextmanager
def accounts_dashboard(hub: HubServer, token: str = ADMIN) -> Iterator[AccountsDashboard]:
    with hub.socket("/ws/dashboard") as wire:
        yield AccountsDashboard(wire, token)


def test_f1_the_feed_sends_accounts_and_then_their_changes() -> None:
    with hub_server(PAYS) as hub, accounts_dashboard(hub) as shown:
        spend(hub, "4")
        hub.hub.gate.hold("writer", {"usd": "1.25"})
        shown.wait_until(lambda: shown.accounts.get("acme/search", {}).get("used") == 0.525, "the spending")
        card = shown.accounts["acme/search"]
        (limit,) = card["limits"]
        assert (card["level"], card["plan"], card["more_limits"]) == ("team", "", 0)
        assert limit["resets_at"] == pytest.approx((hub.clock.wall() // 86400 + 1) * 86400, abs=1)
        known = {name: limit[name] for name in ("account", "level", "resource", "tool", "limit", "amount", "used")}
        assert known == {
            "account": "acme/search", "level": "team", "resource": "usd", "tool": "", "limit": "10 usd/calendar day",
            "amount": "10", "used": 0.525,
        }  # fmt: skip
        assert (limit["spent"], limit["held"], limit["left"]) == ("4.000000", "1.250000", "4.750000")
        hub.hub.gate.set_account_limit("initech", "usd", "7 in all")
        hub.hub.gate.set_agent_account("cook", "initech")
        before = len(shown.frames)
        shown.wait_until(lambda: "initech" in shown.accounts, "the new account")
        sent = [card["path"] for frame in shown.frames[before:] for card in frame.get("accounts", ())]
        assert sent == ["initech"], "the others haven't changed"
        hub.hub.gate.set_account_limit("initech", "usd", None)
        hub.hub.gate.set_agent_account("cook", "")
        shown.wait_until(lambda: "initech" not in shown.accounts, "its end")


@pytest.mark.parametrize("token", [VIEWER, ""], ids=["viewer", "public"])
def test_f1_only_admins_get_accounts(token: str) -> None:
    with (
        hub_server(PAYS, public_dashboard=True) as hub,
        accounts_dashboard(hub) as admin,
        accounts_dashboard(hub, token) as other,
    ):
        spend(hub, "9")
        admin.wait_until(lambda: admin.accounts.get("acme/search", {}).get("used") == 0.9, "the spending")
        admin.wait_until(lambda: admin.last("summary")["open_account_alerts"] == 1, "the alert")
        for _ in range(3):
            other.follow()
        assert "acme" not in str(other.frames)
        assert (other.last("summary")["open_alerts"], other.last("summary")["open_account_alerts"]) == (0, 0)


def test_f1_nothing_is_read_unless_an_admin_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = Gate.aaccounts

    async def noted(self: Gate, paths: Any) -> list[AccountStatus]:
        asked.extend(paths)
        return await real(self, paths)

    monkeypatch.setattr(Gate, "aaccounts", noted)
    with hub_server(PAYS) as hub:
        with accounts_dashboard(hub, VIEWER) as viewer:
            for _ in range(3):
                viewer.follow()
            assert asked == []
        with accounts_dashboard(hub) as admin:
            admin.wait_until(lambda: len(admin.accounts) == 2, "both")
        wait_for(lambda: not hub.hub.dashboard._accounts._running, "the end of it")


# Bounds ---------------------------------------------------------------------------------------------------------------


def gate_with(many: int) -> Gate:
    """A gate with many accounts, ten teams in each organisation."""
    paths = [f"org-{n // 11:03}" + (f"/team-{n % 11:02}" if n % 11 else "") for n in range(many)]
    policy = Policy(
        accounts={"at": {path: {"usd": "100 in all"} for path in paths}},
        agents={f"agent-{number}": {"account": path} for number, path in enumerate(paths)},
    )
    return Gate(policy, store=MemoryStore(clock=ManualClock(1000)))


class CountedReader(AccountReader):
    """Notes which accounts each pass reads."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate, gate.store.clock)
        self.passes: list[list[str]] = []

    def _due(self) -> list[str]:
        self.passes.append(super()._due())
        return self.passes[-1]


async def test_f1_each_pass_reads_a_bounded_number_and_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_TIME", math.inf)
    reader = CountedReader(gate_with(1100))
    for _ in range(11):
        await reader._pass()
    assert {len(paths) for paths in reader.passes} == {module.MAX_READ}
    assert len({path for paths in reader.passes for path in paths}) == reader.total == 1100


async def test_f1_accounts_with_new_holds_are_read_first() -> None:
    gate = gate_with(1100)
    reader = CountedReader(gate)
    stop = gate.subscribe(reader._on_event)
    await reader._pass()
    gate.hold("agent-1050", {"usd": "90"})
    await reader._pass()
    assert {"org-095", "org-095/team-05"} <= set(reader.passes[1])
    assert reader.shown()["org-095/team-05"].used == 0.9
    assert len(reader.passes[1]) == module.MAX_READ
    stop()


async def test_f1_the_worst_are_shown_with_the_accounts_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ACCOUNTS", 5)
    monkeypatch.setattr(module, "MAX_READ", 10_000)
    monkeypatch.setattr(module, "_MAX_TIME", 60.0)
    gate = gate_with(1100)
    gate.set_account_limit("org-095", "usd", "1000 in all")
    gate.hold("agent-1050", {"usd": "90"})
    reader = AccountReader(gate, gate.store.clock)
    await reader._pass()
    shown = reader.shown()
    assert list(shown)[:2] == ["org-095", "org-095/team-05"]
    assert (len(shown), reader.total) == (5, 1100)


async def test_f1_while_the_store_is_away_the_figures_stay_and_get_older(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gate_with(5)
    reader = AccountReader(gate, gate.store.clock)
    await reader._pass()
    before, loop = reader.shown(), asyncio.get_running_loop()
    now = loop.time()

    async def away(_paths: Any) -> None:
        raise StoreAway("it is away")

    monkeypatch.setattr(gate, "aaccounts", away)
    monkeypatch.setattr(loop, "time", lambda: now + 42)
    await reader._pass()
    assert reader.shown() == before
    assert reader.age(list(before)) == 42


async def test_f1_limits_of_one_account_are_bounded() -> None:
    tools = {f"tool-{number:02}": {"requests": "10/minute"} for number in range(30)}
    gate = Gate(Policy(accounts={"at": {"acme": {"tools": tools}}}), store=MemoryStore(clock=ManualClock(1000)))
    reader = AccountReader(gate, gate.store.clock)
    await reader._pass()
    card = reader.shown()["acme"]
    assert (len(card.limits), card.more_limits) == (module.MAX_LIMITS, 10)
    gate.set_account_limit("acme", "requests", "unlimited", tool="tool-29")
    await reader._pass()
    assert reader.shown()["acme"].more_limits == 9


def test_f1_many_dashboards_share_what_is_read() -> None:
    with hub_server(PAYS) as hub, ExitStack() as stack:
        boards = [stack.enter_context(accounts_dashboard(hub)) for _ in range(5)]
        spend(hub, "4")
        for one in boards:
            one.wait_until(lambda one=one: one.accounts.get("acme/search", {}).get("used") == 0.4, "the spending")
