"""Both clients against a server that misbehaves at random: nothing acknowledged is lost, and nobody hangs."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from headgate.client import Refused
from tests.support.event_loop import run
from tests.support.hub_clients import Kind, RelayKind, both_clients
from tests.support.module_process import module_process
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once
SPEED = 100  # seconds of the client's clock in a second
LASTING = 30  # seconds after which a connection counts as good
MESSAGES = 25
TOGETHER = 25  # clients at a time


class FastClock:
    """A clock on which waits are short."""

    def now(self) -> int:
        return time.monotonic_ns() * SPEED // 1000

    def alarm(self, when: int, wake: Callable[[], None]) -> float | None:
        return max(when - self.now(), 0) / 1_000_000 / SPEED

    def wall(self) -> float:
        return time.time()


async def check_seed(kind: Kind, port: int, seed: int) -> bool:
    """Send messages by a client to the server of a seed, and compare what each of them knows.

    False if the waits could not be compared.
    """
    random = Random(seed)
    in_flight = random.choice((1, 1, 8))
    client: Any = kind.client(
        f"http://127.0.0.1:{port}/{seed}", "alice", "token",
        clock=FastClock(), random=random, answer_within=60, in_flight=in_flight, on_rate_limited=lambda _: None,
        on_disconnected=lambda loss: waits.append(loss.wait),
    )  # fmt: skip
    received: list[str] = []
    waits: list[float] = []

    async def read() -> None:
        async for message in client:
            if kind is RelayKind:
                received.append(message.body.decode())
            elif message["type"] == "message":
                received.append(message["body"])

    async with asyncio.timeout(PATIENCE), client:
        reading = asyncio.create_task(read())
        sends = [asyncio.create_task(kind.send(client, "bob", str(body))) for body in range(MESSAGES)]
        cancelled = set(random.sample(range(MESSAGES), 2))
        await asyncio.wait([sends[min(cancelled)]], timeout=random.random() * 0.05)
        for number in cancelled:
            sends[number].cancel()
        ends = await asyncio.gather(*sends, return_exceptions=True)
        assert await client.close() == 0
        await reading
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        log = (await http.get(f"http://127.0.0.1:{port}/{seed}{kind.path}/log")).json()
    check_messages(log, ends, in_order=in_flight == 1)
    check_received(log, received)
    return check_connections(log, waits)


def check_messages(log: dict[str, Any], ends: list[BaseException | None], *, in_order: bool) -> None:
    unexpected = [end for end in ends if end is not None and not isinstance(end, Refused | asyncio.CancelledError)]
    assert not unexpected
    accepted = [int(body) for _, _, body in log["accepted"]]
    lost = {number for number, end in enumerate(ends) if end is None} - set(accepted)
    assert not lost, f"acknowledged, but not accepted: {lost}"
    once_each = {(connection, frame_id) for connection, frame_id, _ in log["accepted"]}
    assert len(once_each) == len(accepted), "the same frame came twice over one connection"
    assert len({frame_id for _, frame_id, _ in log["accepted"]}) == len(set(accepted)), "a frame has got another id"
    if in_order:
        first = list(dict.fromkeys(accepted))
        assert first == sorted(first)


def check_received(log: dict[str, Any], received: list[str]) -> None:
    """Every message that was received was sent, once and in order."""
    positions = [log["messages"].index(body) for body in received]
    assert all(one < other for one, other in pairwise(positions))


def check_connections(log: dict[str, Any], waits: list[float]) -> bool:
    """From the third failure in a row on, at most one connection a second: so the client says, and so it does."""
    failures = 0
    if len(waits) != len(log["connections"]) - 1:  # the last one was closed
        return False  # on a busy machine the client gave up a handshake before the server saw it: which wait is whose?
    for (before, after), wait in zip(pairwise(log["connections"]), waits, strict=True):
        took = (after["at"] - before["at"]) / 1000 * SPEED
        is_success = before["answered"] or took - wait > LASTING
        failures = 0 if is_success else failures + 1
        least = 1.0 if failures >= 3 else 0.25
        assert wait >= least, f"{failures} failures: {waits}"
        assert took >= least, f"{failures} failures: {log['connections']}"
    return True


def campaign(kind: Kind, seeds: range) -> None:
    """Run many seeds, some at a time. What is left of them does not become more and more."""
    logging.getLogger("headgate.client").setLevel(logging.CRITICAL)
    failures: dict[int, BaseException] = {}
    compared: list[bool] = []
    objects: list[int] = []
    unhandled: list[Any] = []

    async def one(port: int, seed: int) -> None:
        try:
            compared.append(await check_seed(kind, port, seed))
        except Exception as error:  # noqa: BLE001 - shown with its seed
            failures[seed] = error

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        async with module_process("misbehaving_server") as server:
            assert server.stdin is not None
            assert server.stdout is not None
            port = int(await server.stdout.readline())
            for first in range(seeds.start, seeds.stop, TOGETHER):
                await asyncio.gather(*[one(port, seed) for seed in seeds[first : first + TOGETHER]])
                gc.collect()
                objects.append(len(gc.get_objects()))
            server.stdin.close()
            await server.wait()

    try:
        run(main())
    finally:
        logging.getLogger("headgate.client").setLevel(logging.NOTSET)
    assert not failures, f"{len(failures)} of {len(seeds)} seeds:\n" + "\n".join(
        f"{seed}: {error!r:.600}" for seed, error in sorted(failures.items())
    )
    assert not unhandled
    assert any(compared), "no wait could be compared with what the server saw"
    assert objects[-1] - objects[len(objects) // 2] < 100, objects


@pytest.mark.long
@both_clients
def test_d5_a_server_that_misbehaves_makes_no_client_lose_double_or_hang(kind: Kind) -> None:
    campaign(kind, range(10))


@pytest.mark.long
@both_clients
def test_d5_a_server_that_misbehaves_by_200_seeds_makes_no_client_lose_double_or_hang(kind: Kind) -> None:
    campaign(kind, range(200))
