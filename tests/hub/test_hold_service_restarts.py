"""The decision service for holds: many at once, stores that are away, restarts and kills."""

import asyncio
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from uuid import uuid4

import httpx
import pytest

from headgate import Gate, ManualClock, Policy, RedisStore
from headgate.hub.app import Hub
from tests.support.hub import hub_settings
from tests.support.hub_process import HubProcess, hub_process
from tests.support.tenant import ACCOUNTS, AGENTS, POLICY, Tenant, hold, open_tenant
from tests.support.valkey import PATIENCE, ValkeyServer

# Many at once, and a store of its own ---------------------------------------------------------------------------------


async def _twenty(tenant: Tenant) -> list[int]:
    """The statuses of holds that 20 tasks make, 5 each; those that are granted are settled."""
    headers = {"Authorization": tenant.planner.headers["authorization"]}
    base = f"http://{tenant.hub}"
    async with httpx.AsyncClient(base_url=base, headers=headers, timeout=PATIENCE, trust_env=False) as client:

        async def work(task: int) -> list[int]:
            found = []
            for number in range(5):
                name = f"{task}-{number}"
                answer = await client.post("/v1/holds", json={"costs": {"usd": "0.3"}, "id": name})
                found.append(answer.status_code)
                if answer.status_code == 201:
                    done = await client.post(f"/v1/holds/{name}/settle", json={"costs": {"usd": "0.3"}})
                    assert done.status_code == 200
            return found

        results = await asyncio.gather(*[work(task) for task in range(20)])
    return [status for result in results for status in result]


@pytest.mark.parametrize("kind", ["memory", "valkey"])
async def test_twenty_tasks_are_granted_exactly_as_much_as_fits(kind: str, request: pytest.FixtureRequest) -> None:
    accounts = {"at": {"acme/search": {"usd": "5 in all"}}}
    policy = Policy(limits={"normal": "100000/minute", "light": "100000/minute"}, accounts=accounts, agents=AGENTS)
    store = None
    if kind == "valkey":
        server: ValkeyServer = request.getfixturevalue("redis_server")
        prefix = f"test-{uuid4().hex}:"
        store = RedisStore(server.url, prefix=prefix, timeout=PATIENCE, clock=ManualClock(start=1000))
    with open_tenant(policy, store=store) as tenant:
        statuses = await _twenty(tenant)
        assert (statuses.count(201), statuses.count(429), len(statuses)) == (16, 84, 100)  # 16 * 0.3 <= 5 < 17 * 0.3
        assert tenant.left("acme/search") == {"usd": "0.200000"}


def test_a_store_that_is_away_is_a_503() -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, store={"on_failure": "closed"})
    with ValkeyServer() as server:
        store = RedisStore(server.url, timeout=PATIENCE, on_failure="closed", clock=ManualClock(start=1000))
        with open_tenant(policy, store=store) as tenant:
            hold(tenant.planner, {"usd": "1"}, id="before")
            server.kill()
            answers = [
                tenant.admin.post("/v1/holds", json={"agent": "planner"}),
                tenant.admin.get("/v1/holds/before?agent=planner"),
                tenant.admin.post("/v1/holds/before/settle?agent=planner"),
                tenant.admin.post("/v1/holds/before/cancel?agent=planner"),
                tenant.admin.get("/v1/accounts/acme"),
            ]
            assert [answer.status_code for answer in answers] == [503] * 5
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)


@pytest.mark.parametrize(("on_failure_holds", "granted"), [("closed", False), ("local", True)])
@pytest.mark.parametrize("opens", [Gate, Hub])
async def test_what_holds_do_in_an_outage_is_the_policys_choice(
    opens: type[Gate | Hub], on_failure_holds: str, granted: bool
) -> None:
    policy = Policy(accounts=ACCOUNTS, agents=AGENTS, store={"on_failure_holds": on_failure_holds})
    with ValkeyServer() as server:
        async with (
            Gate(policy, store=server.url) if opens is Gate else Hub(hub_settings(store=server.url), policy) as one
        ):
            gate = one if isinstance(one, Gate) else one.gate
            server.signal(SIGSTOP)
            hold = await gate.ahold("planner", {"usd": "2"})
            server.signal(SIGCONT)
            assert (bool(hold), hold.decision.degraded) == (granted, True)


# A hub that is restarted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["", "memory://"])
async def test_a_hub_without_a_server_remembers_budgets_and_holds(tmp_path: Path, store: str) -> None:
    settings = hub_settings(data=tmp_path, store=store)
    async with Hub(settings, POLICY) as hub:
        await hub.gate.ahold("planner", {"usd": "3"}, hold_id="open", lease=600)
        await (await hub.gate.ahold("planner", {"usd": "1"})).asettle({"usd": "0.5"})
        assert hub.health.disk == "ok"
    async with Hub(settings, POLICY) as hub:
        hold = await hub.gate.afind_hold("planner", "open")
        assert (hold.state, hold.costs["usd"]) == ("open", Decimal(3))
        await hold.asettle({"usd": "2"})
        today = datetime.now(UTC).date()
        usage = await hub.gate.ausage(today - timedelta(days=1), today, "acme")
        assert sum(one.amount for one in usage if one.resource == "usd") == Decimal("2.5")


def _make_old(data: Path) -> None:
    for file in data.glob("limits.db*"):
        file.unlink()
    with closing(sqlite3.connect(data / "hub.db")) as db:
        db.execute("DROP TABLE invitation_notes")


async def test_the_data_of_an_older_hub_is_used(tmp_path: Path) -> None:
    settings = hub_settings(data=tmp_path, registration="invitation")
    async with Hub(settings, POLICY) as hub:
        token, code = await hub.registry.register("planner", by_admin=True), await hub.registry.invite()
    _make_old(tmp_path)
    async with Hub(settings, POLICY) as hub:
        assert await hub.registry.owner(token) == "planner"
        assert await hub.registry.register("guest", code)
        assert await hub.gate.ahold("planner", {"usd": "3"})


async def test_nothing_is_written_for_plain_buckets(tmp_path: Path) -> None:
    async with Hub(hub_settings(data=tmp_path), POLICY) as hub:
        for _ in range(10):
            await hub.gate.acheck("planner", "http", "light")
        assert not (tmp_path / "limits.db-wal").exists()
        await hub.gate.ahold("planner", {"usd": "3"})
        assert (tmp_path / "limits.db-wal").exists()


# A hub that is killed -------------------------------------------------------------------------------------------------

KILLED = """
[accounts.at.acme]
usd = "10 in all"
[agents.planner]
account = "acme"
"""


def _left(hub: HubProcess) -> str:
    with hub.http() as admin:
        (limit,) = admin.get("/v1/accounts/acme").json()["limits"]
        left: str = limit["left"]
        return left


@pytest.mark.long
def test_what_is_held_survives_kill_9_and_can_be_settled(tmp_path: Path) -> None:
    file, data = tmp_path / "headgate.toml", tmp_path / "data"
    file.write_text(KILLED)
    with hub_process(data, "--config", str(file)) as hub:
        with hub.http() as admin:
            token = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]
        with hub.http(token) as planner:
            hold(planner, {"usd": "4"}, id="open", lease=600)
            hold(planner, {"usd": "1"}, id="done")
            assert planner.post("/v1/holds/done/settle", json={"costs": {"usd": "0.5"}}).status_code == 200
        hub.kill()
    with hub_process(data, "--config", str(file)) as hub, hub.http(token) as planner:
        assert _left(hub) == "5.500000"
        assert planner.get("/v1/holds/open").json()["state"] == "open"
        assert planner.post("/v1/holds", json={"costs": {"usd": "5.6"}}).status_code == 429
        assert hold(planner, {"usd": "4"}, id="open", lease=600)["state"] == "open"  # a retry after the lost answer
        assert planner.post("/v1/holds/open/settle", json={"costs": {"usd": "1.25"}}).status_code == 200
        assert _left(hub) == "8.250000"
        hub.kill()
    with hub_process(data, "--config", str(file)) as hub:
        assert _left(hub) == "8.250000"
    assert (data / "limits.db").stat().st_mode & 0o077 == 0
