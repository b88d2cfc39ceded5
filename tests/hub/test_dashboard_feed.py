"""The live dashboard's socket: a snapshot, then the changes; access and bounds."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
from websockets.sync.client import ClientConnection

from headgate import Decision, Gate, Policy
from headgate.gate.changes import exemption
from headgate.hub.dashboard import feed, updates
from headgate.hub.dashboard.cards import AgentCard
from headgate.hub.dashboard.feed import MAX_PUBLIC, MAX_QUEUED
from headgate.hub.dashboard.updates import MAX_CARDS
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT
from tests.support.agent_connections import ping, read_close
from tests.support.hub import ADMIN, VIEWER, AgentConnection, HubServer, hub_server
from tests.support.valkey import wait_for

FEW = Policy(limits={"light": "10/minute"})
EVERY = feed._INTERVAL
FRAME = updates._FRAME_CARDS


@pytest.fixture(autouse=True)
def with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """No card is looked at again without a reason, which would hide that one was missed.

    And no update comes by itself, for which a slow machine would have time where there should be none.
    """
    monkeypatch.setattr(updates, "_ROTATED", 0)
    monkeypatch.setattr(feed, "_INTERVAL", 3600.0)


@pytest.fixture
def by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates come as they always do."""
    monkeypatch.setattr(feed, "_INTERVAL", EVERY)


class Dashboard(AgentConnection):
    """What a dashboard knows: the snapshot, with all updates put into it."""

    def __init__(self, hub: HubServer, socket: ClientConnection) -> None:
        super().__init__(socket)
        self._hub = hub

    def open(self, token: str | None) -> "Dashboard":
        self.say("watch", **({} if token is None else {"token": token}))
        self.state = self.hear()
        assert self.state["type"] == "snapshot", self.state
        self.agents = {card["agent_id"]: card for card in self.state["agents"]}
        while len(self.agents) < self.state["summary"]["agents"] - self.state["more"]:
            self._take_in(self.hear())  # the cards that don't fit into the snapshot
        return self

    def follow(self) -> dict[str, Any]:
        """Take in the next update, without waiting for the next turn."""
        self._hub.call(self._hub.hub.dashboard.refresh)
        return self._take_in(self.hear())

    def _take_in(self, update: dict[str, Any]) -> dict[str, Any]:
        assert update.pop("type") == "update"
        told = dict(update)
        for agent in update.pop("gone", ()):
            del self.agents[agent]
        for changed in update.pop("agents", ()):
            self.agents.setdefault(changed["agent_id"], {}).update(changed)
        self.state.update(update)
        return told

    def wait_until(self, holds: Any, what: str) -> None:
        """Follow until something holds."""
        wait_for(lambda: holds() or (self.follow() and holds()), what)


@contextmanager
def dashboard(hub: HubServer, token: str | None = ADMIN) -> Iterator[Dashboard]:
    with hub.socket("/ws/dashboard") as wire:
        yield Dashboard(hub, wire.socket).open(token)


def refusal(hub: HubServer, token: str | None = None) -> tuple[dict[str, Any], int]:
    """The error for one more dashboard, which is then closed, and the code of the close."""
    with hub.socket("/ws/dashboard") as wire:
        refused = wire.ask("watch", **({} if token is None else {"token": token}))
        assert refused["type"] == "error"
        return refused, read_close(wire)[0]


# What it shows --------------------------------------------------------------------------------------------------------


def test_b7_a_snapshot_is_followed_by_changes() -> None:
    with hub_server(FEW) as hub, hub.agent("planner") as planner, hub.agent("idle"), dashboard(hub) as board:
        assert board.state["slot_seconds"] == SLOT
        assert (board.state["agent_slots"], board.state["fleet_slots"]) == (AGENT_SLOTS, FLEET_SLOTS)
        assert len(board.state["timeline"]) == FLEET_SLOTS
        assert set(board.agents) == {"planner", "idle"}
        idle = {
            "agent_id": "idle", "connected": True, "violations": 0, "violations_last_hour": 0, "wait_left_ms": 0,
            "rate_limited": False, "denied_by_account": False, "exempt": False, "override": False, "spark": [],
            "blocked": False, "denied_per_minute": 0, "role": "",
            "usage": {"channel": "ws", "tier": "light", "used": 0.0, "remaining": 10, "capacity": 10},
        }  # fmt: skip
        assert board.agents["idle"] == idle
        ping(planner, 5)
        board.wait_until(lambda: board.state["summary"]["checks"] == 5, "the five checks")
        card = board.agents["planner"]
        assert card["usage"] == {"channel": "ws", "tier": "light", "used": 0.5, "remaining": 5, "capacity": 10}
        assert card["spark"] == [[200, 5, 0]]
        assert board.state["timeline"] == [[200, 5, 0, 0]]
        assert board.state["summary"]["checks_per_second"] == 1.0  # five within a slot of five seconds
        ping(planner, 7)
        board.wait_until(lambda: board.state["summary"]["violations_last_hour"] == 2, "the violations")
        card = board.agents["planner"]
        assert (card["violations"], card["violations_last_hour"], card["rate_limited"]) == (2, 2, True)
        assert card["wait_left_ms"] == 2000
        assert card["spark"] == [[200, 10, 2]]
        assert board.state["timeline"] == [[200, 8, 2, 2]]
        assert board.state["summary"]["worst_offenders"] == [{"agent_id": "planner", "violations": 2}]
        assert board.state["summary"]["denied_share"] == round(2 / 12, 4)
        assert board.agents["idle"] == idle


def test_unchanged_fields_are_not_sent() -> None:
    with hub_server() as hub, hub.agent("planner") as planner, dashboard(hub) as board:
        assert board.follow() == {"slot": 200}
        ping(planner, 1)
        board.wait_until(lambda: board.state["summary"]["checks"] == 1, "the check")
        assert board.follow() == {"slot": 200}
        hub.clock.advance(0.25)  # half a token comes back: nothing to be seen
        assert board.follow() in ({"slot": 200}, {"slot": 200, "summary": board.state["summary"]})
        hub.clock.advance(0.25)
        board.wait_until(lambda: board.agents["planner"]["usage"]["used"] == 0, "a full bucket")


@pytest.mark.usefixtures("by_itself")
def test_b7_it_updates_by_itself_each_second() -> None:
    assert EVERY == 1.0
    with hub_server() as hub, hub.agent("planner") as planner, dashboard(hub) as board:
        for number in range(1, 3):
            ping(planner, 1)
            told = board.hear()  # nobody has asked for it
            while "summary" not in told:  # the ping took longer than a second
                told = board.hear()
            assert told["summary"]["checks"] == number


@pytest.mark.usefixtures("by_itself")
def test_b7_the_first_dashboard_gets_updates_though_many_cards_take_several_turns() -> None:
    with hub_server() as hub:
        hub.run(hub.hub.gate.achange([exemption(f"agent-{number}", True) for number in range(3 * updates._BATCH)]))
        with dashboard(hub) as board:
            assert board.hear()["type"] == "update"


def test_a_countdown_is_not_sent_again() -> None:
    with hub_server(FEW) as hub, hub.agent("planner") as planner, dashboard(hub) as board:
        ping(planner, 11)
        board.wait_until(lambda: board.agents["planner"]["wait_left_ms"] == 1000, "the wait")
        hub.clock.advance(0.5)
        told = board.follow()
        assert all("wait_left_ms" not in card for card in told.get("agents", ()))
        hub.clock.advance(60)
        board.wait_until(lambda: not board.agents["planner"]["rate_limited"], "the end of the quiet period")
        assert (board.agents["planner"]["wait_left_ms"], board.agents["planner"]["violations"]) == (0, 0)


def test_agents_come_and_go_and_slots_go_on() -> None:
    with hub_server() as hub, dashboard(hub, VIEWER) as board:
        assert (board.agents, board.state["admin"]) == ({}, False)
        with hub.agent("planner") as planner:
            ping(planner, 3)
            board.wait_until(lambda: board.agents.get("planner", {}).get("connected"), "the agent's card")
        board.wait_until(lambda: not board.agents["planner"]["connected"], "the end of its connection")
        hub.clock.advance(SLOT)
        board.wait_until(lambda: board.state["slot"] == 201, "the next slot")
        assert board.state["timeline"] == [[201, 0, 0, 0]]
        hub.clock.advance(SLOT * AGENT_SLOTS)
        with hub.agent("other") as other:
            ping(other, 1)
            board.wait_until(lambda: "planner" not in board.agents, "the end of its card")
            assert set(board.agents) == {"other"}


def test_a_change_by_the_admin_is_seen_at_once() -> None:
    with hub_server(FEW) as hub, hub.agent("planner") as planner, dashboard(hub) as board, hub.http(ADMIN) as admin:
        ping(planner, 12)
        limits = "/api/admin/rate-limits"
        assert admin.put(f"{limits}/planner", json={"light": "40/minute"}).status_code == 200
        board.wait_until(lambda: board.agents["planner"]["override"], "the override")
        assert board.agents["planner"]["usage"]["capacity"] == 40
        assert admin.delete("/api/admin/violations/planner").json()["reset"]
        board.wait_until(lambda: not board.agents["planner"]["rate_limited"], "no violations")
        assert board.state["summary"]["violations_last_hour"] == 0
        assert admin.post(f"{limits}/whitelist", json={"agent_id": "planner"}).status_code == 200
        board.wait_until(lambda: board.agents["planner"]["exempt"], "the exemption")
        assert (board.agents["planner"]["usage"], board.state["summary"]["exempt"]) == (None, 1)
        assert admin.post(f"{limits}/whitelist", json={"agent_id": "elsewhere"}).status_code == 200
        board.wait_until(lambda: board.agents.get("elsewhere", {}).get("exempt"), "one that isn't connected")


def test_a_card_shows_the_rules_of_one_moment() -> None:
    """Whatever changes while its buckets are read: the next update has that."""

    class Exempting(Gate):
        async def apeek(self, agent: str, channel: str, tier: str) -> Decision:
            decision = await super().apeek(agent, channel, tier)
            if not self.is_exempt(agent):
                self.add_exemption(agent)
            return decision

    with hub_server(FEW, gate=Exempting) as hub:
        before, after = [hub.run(hub.hub.dashboard._state._cards.of(["planner"]))[0] for _ in range(2)]
    assert (before.usage is not None, before.exempt) == (True, False)
    assert (after.usage is not None, after.exempt) == (False, True)


def test_b7_the_dashboard_and_the_api_agree() -> None:
    with hub_server(FEW) as hub, dashboard(hub) as first, ExitStack() as stack, hub.http(VIEWER) as viewer:
        agents = [stack.enter_context(hub.agent(f"agent {number}")) for number in range(5)]
        for number, agent in enumerate(agents):
            ping(agent, 3 * number + 1)
            hub.clock.advance(0.5)
        state = viewer.get("/api/dashboard/state").json()
        first.wait_until(lambda: first.state["summary"] == state["summary"], "the same summary")
        with dashboard(hub) as second:
            for board in (first, second):
                found = {agent: dict(card) for agent, card in board.agents.items()}
                for card in found.values():
                    del card["spark"]
                wanted = {card["agent_id"]: card for card in state["agents"]}
                for card in [*wanted.values(), *found.values()]:
                    del card["wait_left_ms"]  # which the page counts down
                assert found == wanted
                state = viewer.get("/api/dashboard/state").json()
            assert [card["spark"] for card in first.agents.values()] == [
                second.agents[agent]["spark"] for agent in first.agents
            ]


def test_an_agent_that_only_uses_http_has_a_card() -> None:
    with hub_server() as hub, dashboard(hub) as board:
        with hub.http(hub.register("quiet")) as agent:
            assert agent.get("/api/mailbox").status_code == 200
        board.wait_until(lambda: "quiet" in board.agents, "its card")
        assert not board.agents["quiet"]["connected"]


def test_a_late_card_comes_with_its_whole_traffic() -> None:
    with hub_server() as hub, dashboard(hub) as board:
        for number in range(MAX_CARDS):
            hub.call(hub.hub.gate.record_violation, f"agent {number:03}")
        board.wait_until(lambda: board.state["more"] == 0 and len(board.agents) == MAX_CARDS, "as many as there can be")
        with hub.agent("quiet") as quiet:
            ping(quiet, 2)
            hub.clock.advance(SLOT)
            ping(quiet, 1)
            board.wait_until(lambda: board.state["more"] == 1, "one that isn't shown")
            assert "quiet" not in board.agents
            hub.clock.advance(SLOT)
            board.follow()
            hub.call(hub.hub.stats.forget, "agent 007")
            board.wait_until(lambda: "quiet" in board.agents, "its card")
            assert board.agents["quiet"]["spark"] == [[200, 2, 0], [201, 1, 0]]


def test_cards_are_bounded_and_the_worst_offenders_are_among_them() -> None:
    with hub_server() as hub:
        for number in range(MAX_CARDS + 20):
            hub.call(hub.hub.gate.add_exemption, f"agent {number:03}")
        hub.call(hub.hub.gate.record_violation, "zebra")
        with dashboard(hub) as board:
            assert (len(board.agents), board.state["more"]) == (MAX_CARDS, 21)
            assert board.state["summary"]["agents"] == MAX_CARDS + 21
            assert board.state["agents"][0]["agent_id"] == "zebra"


def test_b7_many_cards_come_in_several_frames_and_other_tasks_have_their_turn() -> None:
    names = [f"agent {number:04}" for number in range(3 * FRAME + 10)]
    with hub_server(FEW) as hub, dashboard(hub) as first:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async def offend() -> None:
            for name in names:
                await hub.hub.stats.check(name, "ws", action="ping")

        async def count_turns_during(work: Callable[[], Awaitable[object]]) -> int:
            """The turns that another task has meanwhile."""
            nonlocal turns
            other = asyncio.create_task(take_turns())
            await asyncio.sleep(0)
            turns = 0
            await work()
            other.cancel()
            return turns

        for _ in range(2):
            hub.run(offend())
            first.wait_until(lambda: len(first.agents) == len(names), "all cards")
            frames = [frame for frame in iter(first.follow, {"slot": 200}) if "agents" in frame]
            assert all(len(frame["agents"]) <= FRAME for frame in frames)
        with dashboard(hub) as second:
            assert len(second.state["agents"]) == FRAME
            assert second.agents == first.agents
        state, batches = hub.hub.dashboard._state, len(names) // updates._BATCH
        state._live = []
        for work in (partial(state._cards.of, names), partial(state._changes, {}, set(names), 0), state._live_cards):
            assert hub.run(count_turns_during(work)) >= batches, work


# Who may look ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["nobodys-token-at-all", "x"])
def test_a_wrong_token_is_refused_and_charged_to_the_address(token: str) -> None:
    with hub_server(Policy(addresses={"authentication": "3/minute"})) as hub:
        for _ in range(3):
            refused, code = refusal(hub, token)
            assert (refused["error"], code) == ("unauthorized", 1008)
        refused, code = refusal(hub, token)
        assert (refused["error"], refused["retry_after_ms"], code) == ("rate_limited", 20_000, 1008)


def test_a_token_is_needed_unless_the_dashboard_is_public() -> None:
    with hub_server() as hub, hub.http() as anyone:
        for token in (None, hub.register("planner")):
            assert refusal(hub, token)[0]["error"] == "unauthorized"
        assert anyone.get("/api/dashboard/state").status_code == 401
    with hub_server(public_dashboard=True) as hub, hub.http() as anyone, hub.http(hub.register("planner")) as agent:
        with dashboard(hub, None) as board:
            assert not board.state["admin"]
        with dashboard(hub, ADMIN) as board:
            assert board.state["admin"]
        assert anyone.get("/api/dashboard/state").status_code == agent.get("/api/dashboard/state").status_code == 200
        assert refusal(hub, "nobodys-token-at-all")[0]["error"] == "unauthorized"
        with hub.http("nobodys-token-at-all") as nobody:
            assert nobody.get("/api/dashboard/state").status_code == 401


def test_a_public_dashboard_shows_no_roles() -> None:
    with hub_server(public_dashboard=True) as hub, hub.http() as anybody, hub.http(VIEWER) as viewer, hub.agent("boss"):
        gate = hub.hub.gate
        with dashboard(hub, None) as strangers, dashboard(hub, VIEWER) as operators:
            hub.run(gate.aset_role("boss", "admin", by="me"))
            operators.wait_until(lambda: operators.agents["boss"]["role"] == "admin", "the role")
            hub.run(gate.achange([exemption("boss")], by="me"))
            strangers.wait_until(lambda: strangers.agents["boss"]["exempt"], "the exemption")
            assert strangers.agents["boss"]["role"] == ""
            hub.run(gate.aset_role("late", "viewer", by="me"))
            with hub.agent("late"):
                strangers.wait_until(lambda: "late" in strangers.agents, "the late one")
                operators.wait_until(lambda: "late" in operators.agents, "the late one")
            assert (strangers.agents["late"]["role"], operators.agents["late"]["role"]) == ("", "viewer")
        with dashboard(hub, None) as strangers:
            assert strangers.agents["boss"]["role"] == ""
        for reader, role in ((anybody, ""), (viewer, "admin")):
            cards = reader.get("/api/dashboard/state").json()["agents"]
            assert [card["role"] for card in cards if card["agent_id"] == "boss"] == [role]


@pytest.mark.parametrize("role", ["", "viewer"])
def test_b7_many_who_ask_at_once_share_a_state_and_no_admin_waits_for_them(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    with hub_server() as hub:
        cards = hub.hub.dashboard._state._cards
        make, made = cards.of, []

        async def work() -> None:
            begun, go_on = asyncio.Event(), asyncio.Event()

            async def held_up(agents: Sequence[str], violations: Mapping[str, int] | None = None) -> list[AgentCard]:
                made.append(len(agents))
                begun.set()
                if len(made) == 1:
                    await go_on.wait()
                return await make(agents, violations)

            monkeypatch.setattr(cards, "of", held_up)
            for number in range(9):
                await hub.hub.stats.check(f"agent-{number}", "ws", "light")
            limits = [2, *range(1, 10), *range(1, 10)]
            asked = [asyncio.create_task(cards.state(limit, role=role)) for limit in limits]
            await begun.wait()
            assert len((await cards.state(1000, role="admin")).agents) == 9
            gone = asyncio.create_task(cards.state(1, role=role))
            await asyncio.sleep(0)
            gone.cancel()
            go_on.set()
            assert [len(state.agents) for state in await asyncio.gather(*asked)] == limits
            assert made == [2, 9, 9], "the first, the admin's, and one for all who wanted more than the first"
            assert len((await cards.state(3, role=role)).agents) == 3, "later a new one is made"
            assert made == [2, 9, 9, 3]

        hub.run(work())


def test_the_dashboard_link_has_the_configured_access_level() -> None:
    for may, admin in (("admin", True), ("viewer", False)):
        with hub_server(dashboard_link=may) as hub:
            token = hub.hub.tokens.link
            with dashboard(hub, token) as board, hub.http(token) as http:
                assert board.state["admin"] is admin
                assert http.get("/api/admin/changes").status_code == (200 if admin else 403)
                assert http.get("/api/dashboard/state").status_code == 200
    with hub_server(dashboard_link="none") as hub:
        assert hub.hub.tokens.link == ""
        assert hub.hub.tokens.recognize("") == ("", "")
        assert refusal(hub, "hgl_")[0]["error"] == "unauthorized"


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        ("", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"type": "identify"}', "Invalid value 'identify' - at `$.type`"),
        ('{"type": "watch", "token": 1}', "Expected `str`, got `int` - at `$.token`"),
        ('{"type": "watch", "token": ""}', "Expected `str` of length >= 1 - at `$.token`"),
        ('{"type": "watch", "agents": []}', "Object contains unknown field `agents`"),
        (b"\xff", None),
        ("x" * 5000, "expected at most 4096 bytes"),
    ],
    ids=range(8),
)
def test_invalid_watch_requests_are_refused(said: str | bytes, detail: str | None) -> None:
    with hub_server() as hub, hub.socket("/ws/dashboard") as wire:
        wire.socket.send(said)
        refused = wire.hear()
        assert (refused["type"], refused["error"]) == ("error", "invalid")
        assert detail is None or refused["detail"] == detail
        assert read_close(wire)[0] == 1008


def test_a_second_frame_from_a_dashboard_closes_it() -> None:
    with hub_server() as hub, dashboard(hub) as board:
        board.say("watch", token=ADMIN)
        assert read_close(board) == (1008, "expected no more frames from a dashboard")


def test_a_dashboard_that_does_not_identify_in_time_is_closed() -> None:
    with hub_server(identify_within=5) as hub, hub.socket("/ws/dashboard") as wire:
        wait_for(lambda: hub.call(lambda: hub.hub.dashboard.sockets), "the socket")
        hub.clock.advance(5)
        assert read_close(wire) == (1008, "identify within 5 seconds")
        wait_for(lambda: not hub.hub.dashboard.sockets, "its end")


# How many, and how slowly they may read -------------------------------------------------------------------------------


def test_dashboards_are_capped() -> None:
    with hub_server(max_dashboards=2) as hub, dashboard(hub), dashboard(hub) as second:
        refused, code = refusal(hub, ADMIN)
        assert (refused["error"], code) == ("too_many_connections", 1013)
        second.socket.close()
        wait_for(lambda: len(hub.hub.dashboard.sockets) == 1, "room")
        with dashboard(hub):
            pass


def test_strangers_keep_nobody_with_a_token_out_of_a_public_dashboard() -> None:
    with hub_server(public_dashboard=True, max_dashboards=3) as hub, ExitStack() as stack:
        strangers = [stack.enter_context(hub.socket("/ws/dashboard")) for _ in range(3)]
        for wire in strangers:
            assert wire.ask("watch")["type"] == "snapshot"
        assert refusal(hub)[0]["error"] == "too_many_connections"
        for token, wire in zip((ADMIN, VIEWER, ADMIN), strangers, strict=True):
            snapshot = stack.enter_context(hub.socket("/ws/dashboard")).ask("watch", token=token)
            assert (snapshot["type"], snapshot["admin"]) == ("snapshot", token == ADMIN)
            assert read_close(wire) == (1013, "too many dashboards are open"), "the oldest makes room"
        refused, code = refusal(hub, ADMIN)
        assert (refused["error"], code) == ("too_many_connections", 1013)


def test_public_dashboards_are_capped_by_address() -> None:
    with hub_server(public_dashboard=True) as hub, ExitStack() as stack:
        for _ in range(MAX_PUBLIC):
            assert stack.enter_context(hub.socket("/ws/dashboard")).ask("watch")["type"] == "snapshot"
        refused, code = refusal(hub)
        assert (refused["error"], code) == ("too_many_connections", 1013)
        assert refused["detail"] == "127.0.0.1 has 10 dashboards without a token, and may have no more"
        with dashboard(hub, VIEWER):
            pass


def test_silent_connections_keep_no_dashboard_out() -> None:
    with hub_server(max_dashboards=2) as hub, ExitStack() as stack:
        strangers = [stack.enter_context(hub.socket("/ws/dashboard")) for _ in range(3)]
        assert read_close(strangers[0]) == (1013, "too many dashboards are being opened")
        with dashboard(hub), dashboard(hub):
            pass


def test_dashboards_do_not_count_as_agent_connections() -> None:
    with hub_server(max_connections=1, max_connections_per_address=1) as hub, dashboard(hub), dashboard(hub):  # noqa: SIM117
        with hub.agent("planner") as planner, dashboard(hub):
            assert planner.ask("ping") == {"type": "pong"}


def test_a_public_dashboard_is_sent_no_network_addresses() -> None:
    policy = Policy(limits={"light": "1/hour"}, addresses={"limit": "1/hour"})
    with hub_server(policy, public_dashboard=True) as hub, hub.agent("planner") as planner, hub.http() as anybody:
        with dashboard(hub, VIEWER) as viewer, dashboard(hub, None) as public:
            for _ in range(12):
                planner.ask("ping")
            assert [anybody.get("/api/agents").status_code for _ in range(3)] == [200, 429, 429]
            for board in (viewer, public):
                board.wait_until(lambda board=board: board.state["alerts"], "the alert")
                board.wait_until(lambda board=board: board.state["summary"]["address_denials"] == 2, "the denials")
            with dashboard(hub, None) as later:
                assert later.state["summary"] == public.state["summary"]
                assert later.state["alerts"] == public.state["alerts"]
        (denied,) = viewer.state["summary"]["denied_addresses"]
        assert (denied["address"], denied["purpose"], denied["denials"]) == ("127.0.0.1", "request", 2)
        assert viewer.state["alerts"][0]["address"] == "127.0.0.1"
        assert public.state["summary"] == {**viewer.state["summary"], "denied_addresses": []}
        assert public.state["alerts"] == [{**viewer.state["alerts"][0], "address": ""}]


@pytest.mark.long
def test_b2_b3_a_flood_of_wrong_tokens_beside_300_agents_is_limited_and_seen() -> None:
    """All from one address, on default settings, without a moment passing: nobody waits for a bucket to refill."""
    with hub_server() as hub, ExitStack() as stack, dashboard(hub, VIEWER) as board:
        token = hub.register("agent-0")
        agents = [stack.enter_context(hub.agent("agent-0", token))]
        agents += [stack.enter_context(hub.agent(f"agent-{number}")) for number in range(1, 300)]
        board.wait_until(lambda: sum(card["connected"] for card in board.agents.values()) == 300, "all of them")
        with hub.http("guess") as http:
            assert Counter(http.get("/api/tasks").status_code for _ in range(100)) == {401: 60, 429: 40}
        with hub.socket() as wire:
            denied = wire.ask("identify", agent_id="agent-7", token="guess")
            assert (denied["type"], denied["retry_after_ms"]) == ("rate_limited", 30_000)
        board.wait_until(lambda: board.state["summary"]["address_denials"] == 41, "the denials")
        summary = board.state["summary"]
        (address,) = summary["denied_addresses"]
        assert (address["address"], address["purpose"], address["denials"]) == ("127.0.0.1", "authentication", 41)
        assert (summary["open_alerts"], summary["limited"], summary["violations_last_hour"]) == (0, 0, 0), "of agents"
        assert {agent.ask("ping")["type"] for agent in agents} == {"pong"}, "open connections are not affected"
        with dashboard(hub, VIEWER) as again, hub.http(VIEWER) as viewer:
            assert again.state["summary"]["address_denials"] == 41, "nor those who were there before"
            (told,) = viewer.get("/api/admin/addresses").json()["addresses"]
            assert told == address
        stack.enter_context(hub.agent("agent-0", token))
        hub.clock.advance(60)
        stack.enter_context(hub.agent("another"))


def test_b8_an_open_alert_goes_on_counting_on_the_dashboard() -> None:
    with hub_server() as hub, dashboard(hub) as board:
        for total in (10, 11, 25):
            while hub.hub.stats.violations < total:
                hub.call(hub.hub.gate.record_violation, "planner")
            board.wait_until(
                lambda total=total: [one["total"] for one in board.state["alerts"]] == [total], "the count"
            )
        assert board.state["summary"]["open_alerts"] == 1


@pytest.mark.long
@pytest.mark.parametrize("agents", [0, FRAME + 1])
def test_a_slow_dashboard_is_closed_and_delays_no_other(agents: int) -> None:
    """One whose connection takes the first frame, and nothing more: no update, or not all of the snapshot."""
    said = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": f'{{"type":"watch","token":"{ADMIN}"}}'},
    ]
    heard: list[dict[str, Any]] = []

    async def receive() -> Any:
        return said.pop(0) if said else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        heard.append(message)
        if message["type"] == "websocket.send" and len(heard) > 2:
            await asyncio.Event().wait()

    with hub_server() as hub, dashboard(hub) as board:
        for number in range(agents):
            hub.call(hub.hub.gate.record_violation, f"agent {number}")
        board.wait_until(lambda: len(board.agents) == agents and board.follow() == {"slot": 200}, "all of them")
        slow = hub.hub({"type": "websocket", "path": "/ws/dashboard", "headers": []}, receive, send)
        hub.call(hub.hub._background.spawn, slow)
        wait_for(lambda: len(heard) >= 2, "its snapshot")
        for _ in range(MAX_QUEUED + 1):
            assert len(hub.hub.dashboard.sockets) == 2
            board.follow()
        board.wait_until(lambda: len(hub.hub.dashboard.sockets) == 1, "the end of the slow one")
        wait_for(lambda: heard[-1]["type"] == "websocket.close", "its close")
        assert (heard[-1]["code"], heard[-1]["reason"]) == (1013, "it reads too slowly")
        assert len(heard) == 4


def test_dashboards_are_told_when_the_hub_stops() -> None:
    with hub_server() as hub, dashboard(hub) as board:
        assert hub.server is not None
        hub.call(hub.server.handle_exit, 15, None)
        wait_for(lambda: hub.hub.health.stopping, "the end")
        told = board.hear()
        while told["type"] == "update":
            told = board.hear()
        assert told["type"] == "going_away"
        assert read_close(board)[0] == 1012


@pytest.mark.usefixtures("by_itself")
def test_nothing_is_computed_without_a_dashboard() -> None:
    with hub_server() as hub:
        board = hub.hub.dashboard
        with dashboard(hub):
            assert board._running
        wait_for(lambda: not board._running, "the end of the last turn")
        with hub.agent("planner") as planner:
            ping(planner, 2)
            with dashboard(hub) as again:
                assert again.agents["planner"]["spark"] == [[200, 2, 0]]
                ping(planner, 1)
                again.wait_until(lambda: again.agents["planner"]["spark"] == [[200, 3, 0]], "the third")
