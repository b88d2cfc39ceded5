"""Streams that end in every way, on real servers: each is charged what it has sent."""

import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.support.http_edges import client_at
from tests.support.server_process import server_process
from tests.support.slot_streams import SLOTS
from tests.support.token_streams import PART, RESERVED, SIZE, TOKEN
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once

LONGEST = 20
"""Parts of the longest stream, or the longest that a client follows one that doesn't end."""


class StreamRequest(NamedTuple):
    name: str
    path: str
    cut: int | None
    """The tokens after which the client leaves; None: it stays."""
    reset: bool
    """Whether it leaves without a farewell."""


def make_requests(number: int) -> Iterator[StreamRequest]:
    """Most are cut by the client, at any token; of the others the application sends all, or raises, or sends a file."""
    rng = random.Random(1)
    for one in range(number):
        name, kind, parts = f"s{one}", one % 10, rng.randint(1, LONGEST)
        if kind < 7:
            yield StreamRequest(name, f"/stream/{name}/0", rng.randint(1, LONGEST * SIZE), rng.random() < 0.5)
        else:
            path = [f"/stream/{name}/{parts}", f"/stream/{name}/{parts}?crash", f"/file/{name}"][kind - 7]
            yield StreamRequest(name, path, None, reset=False)


def read_stream(port: int, ask: StreamRequest) -> int:
    """The tokens that a client has received when it leaves, or when all was sent."""
    received = 0
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(f"GET {ask.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        while ask.cut is None or received < ask.cut:
            data = client.recv(SIZE)
            if not data:
                break
            received += data.count(TOKEN)
        if ask.reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return received


@pytest.mark.long
@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian", "gunicorn"])
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.long)], ids=["memory", "redis"])
def test_100_streams_cut_at_random_points_are_charged_what_they_have_sent(
    server: str, shared: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(PART)
    environment, options = {"FILE": str(file)}, ["--threads=8"] if server == "gunicorn" else []
    if shared:
        redis_server: ValkeyServer = request.getfixturevalue("redis_server")
        with redis_server.client() as raw:
            raw.flushall()
        environment["STORE"] = redis_server.url
    app = f"tests.support.token_streams:{'wsgi' if server == 'gunicorn' else 'asgi'}_app"
    asked = [*make_requests(100)]
    totals: dict[str, tuple[int, int]] = {}

    def settled() -> bool:
        totals.update(client.get("/totals").json())
        return len(totals) == len(asked) and all(charged != RESERVED for _, charged in totals.values())

    with (
        server_process(server, app, *options, **environment) as port,
        client_at(port) as client,
        ThreadPoolExecutor(8) as clients,
    ):
        received = dict(zip(asked, clients.map(partial(read_stream, port), asked), strict=True))
        try:
            wait_for(settled, "the settlements")
        finally:
            print({ask: (received[ask], totals.get(ask.name)) for ask in asked})
    for ask in asked:
        sent, charged = totals[ask.name]
        assert received[ask] <= charged, ask
        assert sent <= charged <= sent + SIZE, ask
        if ask.cut is None:
            assert sent == charged, ask
            # Of a stream that crashes, a server may discard what it hasn't written yet.
            assert received[ask] == sent or ("crash" in ask.path and received[ask] >= sent - SIZE), ask


def ask_for_slot(port: int, number: int) -> str:
    """The status of a stream that ends, or crashes, or is left by its client."""
    rng = random.Random(number)
    path = ["/stream/0", "/stream/20", "/stream/20?crash"][number % 3]
    received, reset = b"", rng.random() < 0.5
    cut = rng.randint(1, 1500) if path == "/stream/0" else None
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        while (cut is None or len(received) < cut) and (data := client.recv(SIZE)):
            received += data
        if reset and cut is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return received.partition(b"\r\n")[0].decode().split()[1]


@pytest.mark.long
@pytest.mark.parametrize("server", ["uvicorn", "hypercorn", "granian", "gunicorn"])
def test_no_more_streams_are_open_than_slots_and_none_is_left(server: str) -> None:
    app = f"tests.support.slot_streams:{'wsgi' if server == 'gunicorn' else 'asgi'}_app"
    options = ["--threads=16"] if server == "gunicorn" else []
    with (
        server_process(server, app, *options) as port,
        client_at(port) as client,
        ThreadPoolExecutor(12) as clients,
    ):
        statuses = [*clients.map(partial(ask_for_slot, port), range(120))]
        assert set(statuses) == {"200", "429"}
        wait_for(lambda: client.get("/used").json()[:2] == [0, 0], "free slots")
        most = client.get("/used").json()[2]
        assert 1 < most <= SLOTS
        if server != "gunicorn":
            with ExitStack() as stack:
                for _ in range(SLOTS):
                    stack.enter_context(connect(f"ws://127.0.0.1:{port}/ws", open_timeout=PATIENCE))
                assert client.get("/used").json()[:2] == [SLOTS, SLOTS]
                with pytest.raises(InvalidStatus), connect(f"ws://127.0.0.1:{port}/ws", open_timeout=PATIENCE):
                    pass
            wait_for(lambda: client.get("/used").json()[:2] == [0, 0], "free slots")
