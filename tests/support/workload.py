"""Agents and operators that make every kind of change to a hub at once, and record each."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random
from typing import Any

import httpx
from websockets.exceptions import WebSocketException

from tests.support.hub_process import ADMIN
from tests.support.recording_clients import ABSENT, ExpectedState, Key, RecordingClient, RecordingConnection, Values

TIERS, CHANNELS = ("light", "normal", "heavy"), ("ws", "http")
LIMITS = [f"{number}000000/second" for number in range(2, 9)]
GONE = (httpx.TransportError, WebSocketException, OSError)
"""The errors of a client whose hub was killed."""


class Workload:
    """Agents and operators that work at once until the hub is gone."""

    def __init__(self, name: str, client: RecordingClient, book: ExpectedState, random: Random) -> None:
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

    async def _do(self, line: RecordingConnection, task: dict[str, Any], how: float) -> None:
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
