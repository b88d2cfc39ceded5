"""A hub that is killed under load: everything acknowledged is there after a restart, and nothing else."""

import asyncio
import json
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.hub_process import PLENTY, RAISED, HubProcess
from tests.support.recording_clients import ExpectedState, Key, RecordingClient, Values
from tests.support.valkey import PATIENCE
from tests.support.workload import Workload

CONFIG = f"""{RAISED}
[hub]
registration = "invitation"
max_connections_per_address = 1000
max_mail = 100000
max_history = 100000
max_channels = 10000
shutdown_within = 30
log_format = "json"
"""


# What is there --------------------------------------------------------------------------------------------------------


class Survey:
    """Reads all that a hub remembers, by what anybody can ask it."""

    def __init__(self, client: RecordingClient, book: ExpectedState, tokens: dict[str, str]) -> None:
        self._client, self._book, self._tokens = client, book, tokens
        self._found: Values = {}

    async def take(self) -> Values:
        await self._limits()
        await self._agents()
        await self._secrets()
        await self._channels()
        await self._tasks()
        for agent in self._tokens:
            if "-away-" in agent:
                await self._mail(agent)
            if "-opener-" in agent:
                await self._sessions(agent)
        return self._found

    def _find(self, key: Key, value: Any) -> None:
        assert key not in self._found, f"{key} is there twice"
        self._found[key] = value

    async def _limits(self) -> None:
        read = self._client.read
        limits = await read("/api/admin/rate-limits")
        for agent, lanes in limits["overrides"].items():
            for channel in lanes:
                for tier, limit in lanes[channel].items():
                    self._find(("override", agent, channel, tier), limit)
        if limits["defaults"]["http"]["heavy"] != PLENTY:
            self._find(("default", "http", "heavy"), limits["defaults"]["http"]["heavy"])
        for agent in (await read("/api/admin/rate-limits/whitelist"))["agents"]:
            self._find(("exempt", agent), True)

    async def _agents(self) -> None:
        last = ""
        while page := (await self._client.read(f"/api/admin/agents?after={last}"))["agents"]:
            for one in page:
                self._find(("agent", one["agent_id"]), "revoked" if one["revoked"] else "registered")
            last = page[-1]["agent_id"]

    async def _secrets(self) -> None:
        """Which of all tokens and invitations that were ever seen are good."""

        async def token(key: Key) -> None:
            status = (await self._client.request("GET", "/api/mailbox", key[1])).status_code
            self._find(key, {200: "good", 401: "worthless"}[status])

        async def invitation(key: Key) -> None:
            taken = {"agent_id": next(iter(self._tokens)), "invitation": key[1]}
            answer = (await self._client.request("POST", "/api/onboard/register", "", taken)).json()
            self._find(key, {"exists": "good", "invitation_unknown": "used"}[answer["error"]])

        await run_concurrently(token(key) for key in self._book.things if key[0] == "token")
        await run_concurrently(invitation(key) for key in self._book.things if key[0] == "invitation")

    async def _channels(self) -> None:
        token = next(iter(self._tokens.values()))
        for channel in (await self._client.read("/api/channels"))["channels"]:
            name = channel["name"]
            if name != "general":
                self._find(("channel", name), True)
            posts = await self._backward(f"/api/channels/{name}/messages", "messages", token)
            self._in_order([(post["number"], post["from"], post["body"]) for post in posts])
            for post in posts:
                self._kept(("post", name, post["body"]), post["number"])

    async def _mail(self, agent: str) -> None:
        after, found = 0, []
        path = "/api/mailbox?limit=100&after="
        while page := (await self._client.read(f"{path}{after}", self._tokens[agent]))["messages"]:
            found += [(mail["number"], mail["from"], mail["body"]) for mail in page]
            after = page[-1]["number"]
        self._in_order(found)
        for _, _, body in found:
            self._find(("mail", agent, body), "kept")

    async def _sessions(self, agent: str) -> None:
        token = self._tokens[agent]
        async with self._client.agent(agent, token) as line:
            for number in range(6):
                session = f"s{number}"
                answer = await line.ask("session_signal", session=session, signal="not one")
                if answer["error"] != "session_closed":
                    assert answer["error"] == "invalid"
                    self._find(("session", agent, session), "open")
                signals = await self._backward(f"/api/sessions/{session}/signals", "signals", token)
                self._in_order([(one["number"], "", one["signal"]["entity"]) for one in signals])
                for one in signals:
                    self._kept(("signal", agent, session, one["signal"]["entity"]), one["number"])

    async def _tasks(self) -> None:
        listed = await all_tasks(self._client)

        async def task(one: dict[str, Any]) -> None:
            found = await self._client.read(f"/api/tasks/{one['task_id']}", self._tokens[one["creator"]])
            key = ("task", found["payload"])
            outcome = {
                "completed": f"completed {json.dumps(found.get('outcome'))}",
                # A task fails by itself if its agents left five times: its last word was that it is open.
                "failed": "open" if "at attempt" in json.dumps(found.get("outcome")) else "failed",
                "queued": "open",
            }
            self._find(key, outcome[found["state"]])
            assert found["attempt"] >= self._book.details.get(key, 0), f"{key}: an assignment was forgotten"

        assert len({one["task_id"] for one in listed}) == len(listed)
        await run_concurrently(task(one) for one in listed)

    def _kept(self, key: Key, number: int) -> None:
        self._find(key, "kept")
        assert self._book.details.get(key, number) == number, f"{key} has another number"

    def _in_order(self, rows: list[tuple[int, str, str]]) -> None:
        """Numbers rise, and with them what each sender has sent, one after the other."""
        assert rows == sorted(rows, key=lambda row: row[0])
        for sender in {row[1] for row in rows}:
            bodies = [body for _, who, body in rows if who == sender]
            assert bodies == sorted(bodies)

    async def _backward(self, path: str, name: str, token: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        before = ""
        while page := (await self._client.read(f"{path}?limit=100{before}", token))[name]:
            found = [*page, *found]
            before = f"&before={page[0]['number']}"
        return found


async def run_concurrently(work: Any) -> None:
    """Do many things, some at once."""
    gate = asyncio.Semaphore(20)

    async def one(piece: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await piece

    await asyncio.gather(*[one(piece) for piece in work])


async def all_tasks(client: RecordingClient, state: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    more = f"&state={state}" if state else ""
    before = ""
    while page := (await client.read(f"/api/admin/tasks?limit=100{more}{before}"))["tasks"]:
        found += page
        before = f"&before={page[-1]['task_id']}"
    return found


async def finish_all_tasks(client: RecordingClient, book: ExpectedState, tokens: dict[str, str]) -> int:
    """Agents that come do all that is open, each task once; how many."""
    waiting = {task["task_id"] for task in await all_tasks(client, "queued")}
    times: Counter[str] = Counter()
    held: set[str] = set()
    done = asyncio.Event()

    async def work(name: str) -> None:
        async with client.agent(name, tokens[name]) as line:
            while sum(times.values()) < len(waiting):
                task = await line.assigned()
                assert task["task_id"] not in held, "a task has two holders"
                held.add(task["task_id"])
                assert (await line.ask("task_accepted", task_id=task["task_id"]))["state"] == "accepted"
                values: Values = {("task", task["payload"]): "completed 1"}
                await line.change(values, "task_updated", "task_complete", task_id=task["task_id"], result=1)
                held.discard(task["task_id"])
                times[task["task_id"]] += 1
            done.set()

    if waiting:
        working: list[asyncio.Task[Any]] = [
            asyncio.create_task(work(name)) for name in tokens if "-worker-" in name or "-sender-" in name
        ]
        working.append(asyncio.create_task(done.wait()))
        finished, before = set[asyncio.Task[Any]](), -1
        while not finished and len(times) > before:  # as long as it goes on
            before = len(times)
            finished, _ = await asyncio.wait(working, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        assert finished, f"{len(waiting) - len(times)} tasks were not assigned again"
        for one in finished:
            one.result()
    assert set(times) == waiting
    assert set(times.values()) <= {1}
    return len(waiting)


# Trials ---------------------------------------------------------------------------------------------------------------


def kill_repeatedly(folder: Path, answers: list[int], seed: int) -> None:
    """Workload a hub and kill it after so many answers, again and again over the same data, and look what is there."""
    file = folder / "headgate.toml"
    file.write_text(CONFIG)
    book, random = ExpectedState(), Random(seed)
    tokens: dict[str, str] = {}

    async def load(hub: HubProcess, trial: int) -> None:
        async with RecordingClient(hub, book) as client:
            actors = Workload(f"t{trial}", client, book, random)
            await actors.prepare()
            tokens.update(actors.tokens)
            await actors.run(hub.pid, answers[trial])

    async def look(hub: HubProcess) -> tuple[int, int]:
        async with RecordingClient(hub, book) as client:
            found = await Survey(client, book, tokens).take()
            book.compare(found)
            book.settle(found)
            tasks = await finish_all_tasks(client, book, tokens)
            book.compare(await Survey(client, book, tokens).take())
            return len(found), tasks

    for trial in range(len(answers)):
        hub = HubProcess(folder / "data", "--config", str(file))
        try:
            asyncio.run(load(hub, trial))
        finally:
            hub.kill()
        if trial % 2:
            HubProcess(folder / "data", "--config", str(file)).kill()  # as it starts
        again = HubProcess(folder / "data", "--config", str(file))
        try:
            things, tasks = asyncio.run(look(again))
        finally:
            code = again.stop()
        print(f"killed after {answers[trial]} answers: {things} things were there, {tasks} tasks were finished later")
        assert code == 0
        levels = {json.loads(line)["level"] for line in (*hub.err, *again.err)}
        assert levels <= {"info", "warning"}


@pytest.mark.long
def test_b11_a_kill_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, [150], 1)


@pytest.mark.long
def test_b11_kills_under_load_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    random = Random(2)
    kill_repeatedly(tmp_path, [1, 50, *(random.randint(300, 3000) for _ in range(5))], 3)
