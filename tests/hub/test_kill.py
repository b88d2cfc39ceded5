"""A hub that is killed under load: what it has acknowledged is there when it starts again, and nothing unasked for."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Self, TypeAlias

import httpx
import pytest
from programs import ADMIN, Program
from servers import PATIENCE
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

CONFIG = """
[limits]
light = "1000000/second"
normal = "1000000/second"
heavy = "1000000/second"
[addresses]
limit = "1000000/second"
registration = "1000000/second"
[hub]
registration = "invitation"
max_connections_per_address = 1000
max_mail = 100000
max_history = 100000
max_channels = 10000
log_format = "json"
"""
TIERS, CHANNELS = ("light", "normal", "heavy"), ("ws", "http")
LIMITS = [f"{number}000000/second" for number in range(2, 9)]
GONE = (httpx.TransportError, WebSocketException, OSError)
"""What a client of a hub that was killed gets."""

Key: TypeAlias = tuple[str, ...]
Values: TypeAlias = dict[Key, Any]
ABSENT = None


class Book:
    """What must be so, by all that was answered; and what may be so, by what was only asked."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._settled: dict[Key, tuple[int, Any]] = {}
        self._pending: dict[Key, dict[int, Any]] = {}
        self.answers = 0
        self.details: dict[Key, Any] = {}
        """What an answer said beyond that: a number, an attempt."""

    def asked(self, values: Values) -> int:
        """Note what is about to be asked for."""
        number = next(self._numbers)
        for key, value in values.items():
            self._pending.setdefault(key, {})[number] = value
        return number

    def answered(self, values: Values, number: int) -> None:
        """It was done; so was all that somebody had asked of the same things before, or it never will be."""
        self.answers += 1
        for key, value in values.items():
            if number > self._settled.get(key, (0, ABSENT))[0]:
                self._settled[key] = (number, value)
            last = self._settled[key][0]
            self._pending[key] = {at: may for at, may in self._pending[key].items() if at > last}

    def may(self, key: Key) -> list[Any]:
        """The values that something may have."""
        return [self._settled.get(key, (0, ABSENT))[1], *self._pending.get(key, {}).values()]

    @property
    def things(self) -> set[Key]:
        """All that was ever asked for."""
        return self._settled.keys() | self._pending.keys()

    def compare(self, found: Values) -> None:
        """Everything that was found may be so; everything that must be so was found."""
        wrong = [
            f"{key}: expected {' or '.join(map(str, self.may(key)))}, got {found.get(key)}"
            for key in sorted(self.things | found.keys())
            if found.get(key) not in self.may(key)
        ]
        assert not wrong, f"{len(wrong)} of {len(found)} things:\n" + "\n".join(wrong[:20])

    def settle(self, found: Values) -> None:
        """What was found is so from now on."""
        for key in self.things | found.keys():
            self._settled[key] = (next(self._numbers), found.get(key))
        self._pending.clear()


class Client:
    """Asks a hub, and keeps book of it."""

    def __init__(self, hub: Program, book: Book) -> None:
        self._where, self._book = hub.where, book
        self._http = httpx.AsyncClient(base_url=f"http://{hub}", timeout=PATIENCE, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def request(self, method: str, path: str, token: str = ADMIN, body: Any = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return await self._http.request(method, path, json=body, headers=headers)

    async def read(self, path: str, token: str = ADMIN) -> Any:
        return (await self.request("GET", path, token)).raise_for_status().json()

    async def change(self, values: Values, method: str, path: str, token: str = ADMIN, body: Any = None) -> Any:
        """Ask for something that, once it is answered, makes these values so."""
        number = self._book.asked(values)
        answer = (await self.request(method, path, token, body)).raise_for_status()
        self._book.answered(values, number)
        return answer.json()

    @asynccontextmanager
    async def agent(self, name: str, token: str) -> AsyncIterator["Line"]:
        async with connect(f"ws://{self._where}/ws", compression=None, proxy=None) as socket:
            line = Line(socket, self._book)
            assert (await line.ask("identify", agent_id=name, token=token))["type"] == "identified"
            yield line


class Line:
    """An agent's WebSocket."""

    def __init__(self, socket: ClientConnection, book: Book) -> None:
        self._socket, self._book = socket, book
        self._ids = count(1)
        self._assigned: list[dict[str, Any]] = []

    async def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Send a frame and hear its answer."""
        number = next(self._ids)
        await self._socket.send(json.dumps({"type": kind, "id": number, **fields}))
        while True:
            heard = await self._hear()
            if heard.get("id") == number:
                return heard
            self._assigned.append(heard)

    async def change(self, values: Values, expected: str, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._book.asked(values)
        answer = await self.ask(kind, **fields)
        assert answer["type"] == expected, answer
        self._book.answered(values, number)
        return answer

    async def assigned(self) -> dict[str, Any]:
        """The next task."""
        return self._assigned.pop(0) if self._assigned else await self._hear()

    async def _hear(self) -> dict[str, Any]:
        heard: dict[str, Any] = json.loads(await self._socket.recv())
        assert "id" in heard or heard["type"] == "task_assigned", heard
        return heard


# Load -----------------------------------------------------------------------------------------------------------------


class Load:
    """Agents and operators who all work at once, until the hub is gone."""

    def __init__(self, name: str, client: Client, book: Book, random: Random) -> None:
        self._name, self._client, self._book, self._random = name, client, book, random
        self.tokens: dict[str, str] = {}
        """Of the agents that keep them."""

    async def prepare(self) -> None:
        """Register those who do the work."""
        roles = ("sender", "away", "publisher", "maker", "worker", "opener")
        for role in roles:
            for number in range(3):
                agent = f"{self._name}-{role}-{number}"
                answer = await self._client.change(
                    {("agent", agent): "registered"}, "POST", "/api/admin/agents", body={"agent_id": agent}
                )
                self.tokens[agent] = answer["token"]

    async def run(self, pid: int, answers: int) -> None:
        """Work until there were so many answers more; then kill the hub, and end when everybody has noticed."""
        enough = self._book.answers + answers
        actors: list[Callable[[int], Awaitable[None]]] = [
            self._register, self._limit, self._exempt, self._send, self._fetch, self._publish, self._make, self._work,
            self._sign,
        ]  # fmt: skip

        async def act(actor: Callable[[int], Awaitable[None]], number: int) -> None:
            try:
                await actor(number)
            except GONE:
                assert self._book.answers >= enough, "the hub was gone too early"

        async def watch() -> None:
            while self._book.answers < enough:  # noqa: ASYNC110 - at any moment, in whatever the hub is doing
                await asyncio.sleep(0)
            os.kill(pid, signal.SIGKILL)

        async with asyncio.TaskGroup() as group:
            for actor in actors:
                for number in range(3):
                    group.create_task(act(actor, number))
            group.create_task(watch())

    def _agent(self, role: str, number: int) -> tuple[str, str]:
        name = f"{self._name}-{role}-{number}"
        return name, self.tokens[name]

    async def _register(self, number: int) -> None:
        """Invitations, registrations, new tokens, revocations."""
        ask = self._client.change
        for turn in count():
            name = f"{self._name}-new-{number}-{turn}"
            code = (await ask({}, "POST", "/api/admin/invitations"))["invitation"]
            invited: Key = ("invitation", code)
            self._book.answered({invited: "good"}, self._book.asked({invited: "good"}))
            body = {"agent_id": name, "invitation": code}
            token = await self._token(
                {("agent", name): "registered", invited: "used"}, "/api/onboard/register", "", body
            )
            if self._random.random() < 0.5:
                token = await self._token({("token", token): "worthless"}, "/api/onboard/rotate", token)
            if self._random.random() < 0.3:
                token = await self._token({("token", token): "worthless"}, f"/api/admin/agents/{name}/token", ADMIN)
            if self._random.random() < 0.3:
                await ask(
                    {("token", token): "worthless", ("agent", name): "revoked"}, "POST", "/api/onboard/revoke", token
                )

    async def _token(self, values: Values, path: str, token: str, body: Any = None) -> str:
        made: str = (await self._client.change(values, "POST", path, token, body))["token"]
        good: Values = {("token", made): "good"}
        self._book.answered(good, self._book.asked(good))
        return made

    async def _limit(self, number: int) -> None:
        """Overrides, and a default."""
        for turn in count():
            agent = f"{self._name}-limited-{number}-{turn % 5}"
            path = f"/api/admin/rate-limits/{agent}"
            if self._random.random() < 0.25:
                values: Values = {("override", agent, channel, tier): ABSENT for channel in CHANNELS for tier in TIERS}
                await self._client.change(values, "DELETE", path)
                continue
            body = {tier: self._random.choice(LIMITS) for tier in self._random.sample(TIERS, 2)}
            values = {("override", agent, channel, tier): body[tier] for channel in CHANNELS for tier in body}
            await self._client.change(values, "PUT", path, body=body)
            if number == 0:
                limit, path = self._random.choice(LIMITS), "/api/admin/rate-limits/defaults"
                await self._client.change(
                    {("default", "http", "heavy"): limit}, "PUT", path, body={"http": {"heavy": limit}}
                )

    async def _exempt(self, number: int) -> None:
        path = "/api/admin/rate-limits/whitelist"
        for turn in count():
            agent = f"{self._name}-exempt-{number}-{turn % 7}"
            if self._random.random() < 0.6:
                await self._client.change({("exempt", agent): True}, "POST", path, body={"agent_id": agent})
            else:
                await self._client.change({("exempt", agent): ABSENT}, "DELETE", f"{path}/{agent}")

    async def _send(self, number: int) -> None:
        """Messages to agents that are away, over HTTP or /ws."""
        sender, token = self._agent("sender", number)
        async with self._client.agent(sender, token) as line:
            for turn in count():
                to, text = f"{self._name}-away-{turn % 3}", f"{sender} {turn:06}"
                values: Values = {("mail", to, text): "kept"}
                if number:
                    body = {"to": to, "body": text}
                    assert not (await self._client.change(values, "POST", "/api/messages", token, body))["delivered"]
                else:
                    await line.change(values, "message_sent", "message", to=to, body=text)

    async def _fetch(self, number: int) -> None:
        """Mail is fetched, and some of it acknowledged."""
        agent, token = self._agent("away", number)
        while True:
            page = (await self._client.read("/api/mailbox?limit=30", token))["messages"]
            taken = [mail for mail in page if self._random.random() < 0.3]
            if taken:
                values: Values = {("mail", agent, mail["body"]): ABSENT for mail in taken}
                body = {"numbers": [mail["number"] for mail in taken]}
                answer = await self._client.change(values, "POST", "/api/mailbox/ack", token, body)
                assert answer["acknowledged"] == len(taken)

    async def _publish(self, number: int) -> None:
        """Channels are made and published to, over HTTP or /ws."""
        sender, token = self._agent("publisher", number)
        channel = "general"
        async with self._client.agent(sender, token) as line:
            for turn in count():
                if turn % 20 == 10:
                    channel = f"{sender}-{turn}"
                    await self._client.change(
                        {("channel", channel): True}, "POST", "/api/channels", token, {"name": channel}
                    )
                key, text = ("post", channel, f"{sender} {turn:06}"), f"{sender} {turn:06}"
                if number:
                    path = f"/api/channels/{channel}/publish"
                    answer = await self._client.change({key: "kept"}, "POST", path, token, {"body": text})
                else:
                    answer = await line.change(
                        {key: "kept"}, "published", "channel_publish", channel=channel, body=text
                    )
                self._book.details[key] = answer["number"]

    async def _make(self, number: int) -> None:
        """Tasks, more than are done."""
        maker, token = self._agent("maker", number)
        for turn in count():
            payloads = [f"{maker} {turn} {part}" for part in range(8)]
            asked = [
                self._client.change({("task", payload): "open"}, "POST", "/api/tasks", token, {"payload": payload})
                for payload in payloads
            ]
            await asyncio.gather(*asked)

    async def _work(self, number: int) -> None:
        """Tasks are accepted, and completed, failed, or left."""
        worker, token = self._agent("worker", number)
        while True:
            async with self._client.agent(worker, token) as line:
                for _ in range(10):
                    task = await line.assigned()
                    await self._do(line, task, self._random.random())
                left = await line.assigned()  # with a task in hand
                assert (await line.ask("task_accepted", task_id=left["task_id"]))["state"] == "accepted"
                if number == 2:
                    await line.assigned()  # which never comes: it holds the other until the end

    async def _do(self, line: Line, task: dict[str, Any], how: float) -> None:
        key, which = ("task", task["payload"]), {"task_id": task["task_id"]}
        self._book.details[key] = max(task["attempt"], self._book.details.get(key, 0))
        if how < 0.6:
            assert (await line.ask("task_accepted", **which))["state"] == "accepted"
        if how < 0.2:
            assert (await line.ask("task_progress", progress=0.5, **which))["state"] == "accepted"
        if how < 0.7:
            done = f"completed {json.dumps(how)}"
            await line.change({key: done}, "task_updated", "task_complete", result=how, **which)
        elif how < 0.8 or task["attempt"] >= 5:
            await line.change({key: "failed"}, "task_updated", "task_failed", error="no", **which)
        else:
            await line.change({key: "open"}, "task_updated", "task_failed", error="not now", retry=True, **which)

    async def _sign(self, number: int) -> None:
        """Sessions are opened, signed in, and closed."""
        agent, token = self._agent("opener", number)
        async with self._client.agent(agent, token) as line:
            for turn in count():
                session = f"s{turn % 6}"
                limit = {"rate": 1000.0, "burst": 1000} if turn % 2 else {}
                await line.change(
                    {("session", agent, session): "open"}, "session_opened", "session_open", session=session, **limit
                )
                for part in range(3):
                    entity = f"{turn:06} {part}"
                    signed = {"type": "seen", "entity": entity, "weight": 1, "timestamp": 0}
                    key = ("signal", agent, session, entity)
                    answer = await line.change(
                        {key: "kept"}, "signal_logged", "session_signal", session=session, signal=signed
                    )
                    self._book.details[key] = answer["number"]
                if self._random.random() < 0.5:
                    await line.change(
                        {("session", agent, session): ABSENT}, "session_closed", "session_close", session=session
                    )


# What is there --------------------------------------------------------------------------------------------------------


class Survey:
    """Reads all that a hub remembers, by what anybody can ask it."""

    def __init__(self, client: Client, book: Book, tokens: dict[str, str]) -> None:
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
        if limits["defaults"]["http"]["heavy"] != "1000000/second":
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

        await together(token(key) for key in self._book.things if key[0] == "token")
        await together(invitation(key) for key in self._book.things if key[0] == "invitation")

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
                "failed": "failed",
                "queued": "open",
            }
            self._find(key, outcome[found["state"]])
            assert found["attempt"] >= self._book.details.get(key, 0), f"{key}: an assignment was forgotten"

        assert len({one["task_id"] for one in listed}) == len(listed)
        await together(task(one) for one in listed)

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


async def together(work: Any) -> None:
    """Do many things, some at once."""
    gate = asyncio.Semaphore(20)

    async def one(piece: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await piece

    await asyncio.gather(*[one(piece) for piece in work])


async def all_tasks(client: Client, state: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    more = f"&state={state}" if state else ""
    before = ""
    while page := (await client.read(f"/api/admin/tasks?limit=100{more}{before}"))["tasks"]:
        found += page
        before = f"&before={page[-1]['task_id']}"
    return found


async def finish(client: Client, book: Book, tokens: dict[str, str]) -> int:
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
        working = [asyncio.create_task(work(name)) for name in tokens if "-worker-" in name or "-sender-" in name]
        ended = asyncio.create_task(done.wait())
        finished, _ = await asyncio.wait([*working, ended], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        for task in (*working, ended):
            task.cancel()
        await asyncio.gather(*working, ended, return_exceptions=True)
        assert finished, f"{len(waiting) - len(times)} tasks were not assigned again"
        for one in finished:
            one.result()
    assert set(times) == waiting
    assert set(times.values()) <= {1}
    return len(waiting)


# Trials ---------------------------------------------------------------------------------------------------------------


def killed(folder: Path, answers: list[int], seed: int) -> None:
    """Load a hub and kill it after so many answers, again and again over the same data, and look what is there."""
    file = folder / "headgate.toml"
    file.write_text(CONFIG)
    book, random = Book(), Random(seed)
    tokens: dict[str, str] = {}

    async def load(hub: Program, trial: int) -> None:
        async with Client(hub, book) as client:
            actors = Load(f"t{trial}", client, book, random)
            await actors.prepare()
            tokens.update(actors.tokens)
            await actors.run(hub.pid, answers[trial])

    async def look(hub: Program) -> tuple[int, int]:
        async with Client(hub, book) as client:
            found = await Survey(client, book, tokens).take()
            book.compare(found)
            book.settle(found)
            tasks = await finish(client, book, tokens)
            book.compare(await Survey(client, book, tokens).take())
            return len(found), tasks

    for trial in range(len(answers)):
        hub = Program(folder / "data", "--config", str(file))
        try:
            asyncio.run(load(hub, trial))
        finally:
            hub.kill()
        if trial % 2:
            Program(folder / "data", "--config", str(file)).kill()  # as it starts
        again = Program(folder / "data", "--config", str(file))
        try:
            things, tasks = asyncio.run(look(again))
        finally:
            code = again.stop()
        print(f"killed after {answers[trial]} answers: {things} things were there, {tasks} tasks were finished later")
        assert code == 0
        levels = {json.loads(line)["level"] for line in (*hub.err, *again.err)}
        assert levels <= {"info", "warning"}


def test_b11_a_kill_under_load_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    killed(tmp_path, [150], 1)


@pytest.mark.long
def test_b11_kills_under_load_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    random = Random(2)
    killed(tmp_path, [1, 50, *(random.randint(300, 3000) for _ in range(5))], 3)
