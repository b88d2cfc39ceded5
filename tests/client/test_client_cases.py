"""The table of cases that the clients in Python and in TypeScript share."""

import asyncio
import logging
import time
from typing import Any

import pytest

from headgate import ManualClock
from headgate.client import Denial, Disconnected, Refused, Unsent
from tests.support.case_server import CASES, ScriptedCase, case_server
from tests.support.event_loop import holds_for_turns, run
from tests.support.hub_clients import Kind, RelayKind, both_clients
from tests.support.valkey import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.once]
ANSWER_WITHIN = 30.0
TOGETHER = 12  # cases at a time


class CaseRun:
    """A client that runs a case, on a clock that is moved to the end of each wait as soon as the client reports it."""

    def __init__(self, kind: Kind, number: int, port: int, runs: dict[str, ScriptedCase]) -> None:
        self._case = CASES[number]
        self._expected: dict[str, Any] = self._case["expected"]
        self._kind, self._clock = kind, ManualClock()
        self._losses: list[Disconnected] = []
        self._denials: list[Denial] = []
        self._messages: list[str] = []
        self._seen = (0, 0, 0)  # losses, denials and silent connections that the clock has been moved for
        options = self._case.get("client", {})
        self._reads = options.get("reads", True)
        self._throws = options.get("listeners") == "throw"
        self._client: Any = kind.client(
            f"http://127.0.0.1:{port}/{number}", "alice", "token",
            clock=self._clock, in_flight=options.get("in_flight", 1), buffer=options.get("buffer", 256),
            on_disconnected=self._lost, on_rate_limited=self._denied,
        )  # fmt: skip
        self._bodies = [str(body).ljust(options.get("bytes", 0)) for body in range(options.get("sends", 0))]
        self._server = runs.setdefault(f"/{number}", ScriptedCase(number))

    async def run(self) -> None:
        entering = asyncio.create_task(self._client.__aenter__())
        await asyncio.sleep(0)
        self._sends = [asyncio.create_task(self._kind.send(self._client, "bob", body)) for body in self._bodies]
        reading = asyncio.create_task(self._read())
        deadline = time.monotonic() + PATIENCE
        while not (self._is_over() and (entering.done() or "final" not in self._expected)):
            assert time.monotonic() < deadline, f"it is not over: {self._found()}"
            await self._move()
            await asyncio.sleep(0.001)
        if "final" in self._expected:
            self._clock.advance(100)
            assert await holds_for_turns(
                lambda: self._server.log["connections"] == self._expected["connections"], turns=5
            )
            with pytest.raises(Refused) as info:
                await self._kind.send(self._client, "bob", "late")
            assert info.value.code == self._expected["final"]
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        await self._client.close(0)
        await asyncio.gather(*self._sends, reading, return_exceptions=True)
        assert self._found() == {**self._found(), **self._bounded()}
        assert [_outcome(send) for send in self._sends] == self._expected.get("sends", [])

    def _is_over(self) -> bool:
        found = self._found()
        answers = [one for one in self._expected.get("sends", []) if one != "closed"]
        return len([send for send in self._sends if send.done()]) >= len(answers) and all(
            found[name] >= value if isinstance(value, int) else len(found[name]) >= len(value)
            for name, value in self._bounded().items()
        )

    def _found(self) -> dict[str, Any]:
        return {
            "waits": [_within(loss.wait, bounds) for loss, bounds in _zip(self._losses, self._expected.get("waits"))],
            "denied": [_within(one.wait, bounds) for one, bounds in _zip(self._denials, self._expected.get("denied"))],
            "messages": self._messages,
            "frames": self._server.log["frames"],
            "unreadable": self._client.unreadable,
            "dropped": self._client.dropped,
            "connections": self._server.log["connections"],
        }

    def _bounded(self) -> dict[str, Any]:
        """What is expected, but for how the calls end."""
        other = ("final", "sends")
        always: dict[str, Any] = {"waits": [], "denied": [], "unreadable": 0}
        if self._reads:
            always.update(messages=[], dropped=0)
        return {**always, **{name: value for name, value in self._expected.items() if name not in other}}

    async def _move(self) -> None:
        """Move the clock to the end of what the client waits for: an attempt, a denied frame, an answer."""
        losses, denials, silent = self._seen
        if len(self._losses) > losses and not self._is_over():
            connections = self._server.log["connections"]
            self._clock.advance(self._losses[losses].wait - 0.000001)
            assert await holds_for_turns(lambda: self._server.log["connections"] == connections, turns=2), (
                "it came early"
            )
            self._clock.advance(0.000001)
            self._seen = (losses + 1, denials, silent)
        elif len(self._denials) > denials and not self._is_over():
            self._clock.advance(self._denials[denials].wait * 1.1 + 0.001)
            self._seen = (losses, denials + 1, silent)
        elif self._server.log["silent"] > silent:
            self._clock.advance(ANSWER_WITHIN - 0.001)
            assert await holds_for_turns(lambda: len(self._losses) == losses, turns=2), "it gave up early"
            self._clock.advance(0.001)
            self._seen = (losses, denials, silent + 1)

    async def _read(self) -> None:
        if self._reads:
            async for message in self._client:
                if self._kind is RelayKind:
                    self._messages.append(message.body.decode())
                elif message["type"] == "message":
                    self._messages.append(message["body"])

    def _lost(self, loss: Disconnected) -> None:
        self._losses.append(loss)
        if self._throws:
            raise RuntimeError(loss.reason)

    def _denied(self, denial: Denial) -> None:
        self._denials.append(denial)
        if self._throws:
            raise RuntimeError(denial.reason)


def _zip(heard: list[Any], bounds: list[list[int]] | None) -> list[tuple[Any, list[int] | None]]:
    return [(one, bounds[place] if bounds and place < len(bounds) else None) for place, one in enumerate(heard)]


def _within(wait: float, bounds: list[int] | None) -> Any:
    """The bounds, if a wait is within them."""
    return bounds if bounds is not None and bounds[0] <= round(wait * 1000, 3) <= bounds[1] else wait * 1000


def _outcome(send: asyncio.Task[None]) -> str:
    error = send.exception()
    if isinstance(error, Refused):
        return error.code
    return "closed" if isinstance(error, Unsent) else repr(error) if error is not None else "acknowledged"


@both_clients
def test_d5_the_client_does_what_the_cases_say(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    name = kind.__name__.removesuffix("Kind").lower()
    numbers = [number for number, case in enumerate(CASES) if case.get("only", name) == name]
    failures: dict[str, BaseException] = {}

    async def main() -> None:
        runs: dict[str, ScriptedCase] = {}
        room = asyncio.Semaphore(TOGETHER)
        async with case_server(runs) as port:

            async def one(number: int) -> None:
                async with room:
                    try:
                        await CaseRun(kind, number, port, runs).run()
                    except Exception as error:  # noqa: BLE001 - shown with its case
                        failures[CASES[number]["name"]] = error

            await asyncio.gather(*map(one, numbers))

    run(main())
    assert not failures, f"{len(failures)} of {len(numbers)} cases:\n" + "\n".join(
        f"{name}: {error!r:.600}" for name, error in failures.items()
    )
