"""Frames that both clients cannot read, long reasons, and denials in the log."""

import asyncio
import json
import re
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection

from headgate.client import HubClient, RelayClient
from headgate.proto import envelope_pb2 as wire
from tests.support.event_loop import run
from tests.support.hub_clients import (
    WELCOMES,
    Denials,
    Kind,
    RelayKind,
    advance_until_done,
    both_clients,
    websocket_url,
)

pytestmark = pytest.mark.once


LAST: dict[str, str | bytes] = {
    "hub": '{"type": "message", "body": "last"}',
    "relay": wire.Envelope(type=wire.MESSAGE_TYPE_DATA, data=wire.Data(body=b"last")).SerializeToString(),
}


@pytest.mark.parametrize(
    ("kind", "frame", "described"),
    [
        ("hub", "{secret", "7 characters: JSONDecodeError"),
        ("hub", b"\xff{secret", "8 bytes: UnicodeDecodeError"),
        ("hub", '["secret"]', "10 characters: expected an object with a type, got list"),
        ("hub", '{"body": "secret"}', "18 characters: expected an object with a type, got dict"),
        ("hub", "[" * 100_000, "100000 characters: RecursionError"),
        ("relay", "secret", "6 characters: expected an Envelope of headgate.v1"),
        ("relay", b"\xffsecret", "7 bytes: expected an Envelope of headgate.v1"),
    ],
)
def test_d5_frames_that_cannot_be_read_are_logged_by_size_and_reason_never_content_and_not_each_of_a_flood(
    kind: str, frame: str | bytes, described: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def greet(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES[kind])
        for _ in range(100):
            await socket.send(frame)
        await socket.send(LAST[kind])
        await socket.wait_closed()

    async def main() -> None:
        async with websocket_url(greet) as url:
            made: Any = HubClient if kind == "hub" else RelayClient
            async with made(url, "alice", "token") as client:
                last = await anext(client)
                assert (last["body"] if kind == "hub" else last.body.decode()) == "last"

    run(main())
    texts = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert all(f"dropped a frame that can't be read, of {described}" in text for text in texts), texts
    assert [re.findall(r"\((\d+) so far\)", text) for text in texts] == [[str(1 << n)] for n in range(7)]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("hub", json.dumps({"type": "error", "error": "unavailable", "detail": "x" * 1_000_000})),
        ("relay", wire.Envelope(error=wire.Error(code="busy", detail="x" * 1_000_000)).SerializeToString()),
        ("relay", wire.Envelope(rate_limited=wire.RateLimited(reason="x" * 1_000_000)).SerializeToString()),
    ],
)
def test_the_reason_of_a_lost_connection_is_short_whatever_the_hub_says(
    kind: str, answer: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(answer)
        await socket.wait_closed()

    async def main() -> str:
        lost = asyncio.get_running_loop().create_future()
        async with websocket_url(refuse) as url:
            made: Any = HubClient if kind == "hub" else RelayClient
            client = made(url, "alice", "token", on_disconnected=lost.set_result)
            opening = asyncio.create_task(client.__aenter__())
            reason: str = (await lost).reason
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        return reason

    assert len(run(main())) == 1000
    assert max([len(record.getMessage()) for record in caplog.records]) < 1200


async def test_an_answer_with_an_empty_id_answers_nothing() -> None:
    async def answer(socket: ServerConnection) -> None:
        await socket.recv()
        await socket.send(WELCOMES["hub"])
        ids: list[Any] = ["", None, [], "0", json.loads(await socket.recv())["id"]]
        for frame_id in ids:
            await socket.send(json.dumps({"type": "pong", "id": frame_id, "for": frame_id}))
        await socket.wait_closed()

    async with websocket_url(answer) as url, HubClient(url, "alice", "token") as client:
        assert await client.ask("ping") == {"type": "pong", "for": "1"}


@both_clients
@pytest.mark.parametrize("handled", [False, True])
def test_d5_a_denial_is_logged_as_a_warning_unless_it_is_handled(
    kind: Kind, handled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        options: dict[str, Any] = {"on_rate_limited": denials} if handled else {}
        async with kind.connect(hub, "alice", in_flight=2, **options) as alice, kind.connect(hub, "bob"):
            sends = [kind.send(alice, "bob", body) for body in ("passes", "is denied")]
            await advance_until_done(hub.clock, alice, asyncio.gather(*sends))

    with kind.limited() as hub:
        denials = Denials(hub.clock)
        run(main())
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if handled:
        assert (found, len(denials)) == ([], 1)
    else:
        reason = "an address may send 1/second" if kind is RelayKind else "the limit of message, which is normal"
        assert len(found) == 1
        assert f": rate limited, waiting {kind.interval:.3f} s: '{reason}" in found[0]
