"""What both clients refuse, and what a hub refuses them."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trustme

from headgate import HeadgateError, InvalidInput
from headgate.client import Refused, RelayClient, RelayMessage
from tests.support.event_loop import holds_for_turns, run, wait_until
from tests.support.hub import HubServer, hub_server
from tests.support.hub_clients import (
    Kind,
    both_clients,
    relay_client,
    take,
    with_hub,
    with_limited_hub,
)

pytestmark = pytest.mark.once


@with_hub(max_frame=2000)
async def test_a_refusal_raises_with_its_code(hub: HubServer) -> None:
    async with relay_client(hub, "alice") as alice, relay_client(hub, "bob") as bob:
        with pytest.raises(Refused, match=r"^unreachable: no connection of this address is open$") as info:
            await alice.send("carol", b"")
        assert info.value.code == "unreachable"
        with pytest.raises(Refused, match="too_large"):  # answered without an id, since nobody reads so far
            await alice.send("bob", b"x" * 3000)
        far_too_large = asyncio.create_task(alice.send("bob", b"x" * 10_000))
        after = asyncio.create_task(alice.send("bob", b"after", content_type="text/plain", in_reply_to="b-1"))
        with pytest.raises(Refused, match="too_large"):  # the hub hangs up
            await far_too_large
        hub.clock.advance(1)
        await after
        (message,) = await take(bob, 1)
        assert message == RelayMessage(after.result(), "alice", b"after", "text/plain", "b-1")


@both_clients
@with_hub()
async def test_b2_a_wrong_token_raises_and_is_not_tried_again(hub: HubServer, kind: Kind) -> None:
    hub.register("alice")
    with pytest.raises(Refused, match=rf"^unauthorized: 'alice' at ws://.*{kind.path}: {kind.wrong_token}"):
        async with kind.connect(hub, "alice", "hg_wrong"):
            pass


@both_clients
@with_limited_hub
async def test_b2_a_token_that_is_revoked_raises_whatever_waits(hub: HubServer, kind: Kind) -> None:
    async with kind.connect(hub, "alice") as alice:
        await kind.send(alice, "alice", "first")
        await kind.take(alice, 1)
        send = asyncio.create_task(kind.send(alice, "alice", "second"))
        message = asyncio.create_task(anext(alice))
        await wait_until(lambda: alice.delay, "the denial")
        hub.run(hub.hub.registry.revoke("alice"))
        await wait_until(lambda: not alice.connected, "the end")
        hub.clock.advance(0.5)
        for task in (send, message):
            with pytest.raises(Refused, match="unauthorized"):
                await task
        with pytest.raises(Refused, match="unauthorized"):
            await kind.send(alice, "alice", "third")
        assert await holds_for_turns(lambda: not alice.connected)


NEW: dict[str, Any] = {"url": "http://hub", "name": "a", "token": "t"}


@both_clients
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "hub.example"}, "url: expected the address of a hub such as http://127.0.0.1"),
        ({"url": "ftp://hub"}, "url: expected the address of a hub"),
        ({"url": "http://hub:99999"}, "url: expected the address of a hub"),
        ({"url": "http://me:secret@hub"}, "url: expected the address of a hub"),
        ({"url": "http://hub/?a=1"}, "url: expected the address of a hub"),
        ({"url": "http://hub?"}, "url: expected the address of a hub"),
        ({"url": "http://hub/#"}, "url: expected the address of a hub"),
        ({"url": "http://@hub"}, "url: expected the address of a hub"),
        ({"url": None}, "url: expected the address of a hub"),
        ({"name": ""}, "agent: expected 1 to 128 printable characters"),
        ({"name": "a\n"}, "agent: expected 1 to 128 printable characters"),
        ({"token": ""}, "token: expected the one that the agent got when it was regist"),
        ({"token": "t" * 257}, "token: expected the one"),
        ({"token": None}, "token: expected the one"),
        ({"most": 0}, "most: expected a whole number from 1"),
        ({"in_flight": 0}, "in_flight: expected a whole number from 1"),
        ({"buffer": 0}, "buffer: expected a whole number from 1"),
        ({"largest": -1}, "largest: expected a whole number from 1"),
        ({"answer_within": 0}, "answer_within: expected a number of seconds above 0"),
        ({"answer_within": -1}, "answer_within: expected a number of seconds"),
        ({"answer_within": float("nan")}, "answer_within: expected a number of seconds"),
        (
            {"larges": 1},
            r"Client: expected options among on_rate_limited, .*, got 'larges'; did you mean largest",
        ),
        ({"x": 1}, r"got 'x'; see headgate\.client\.(hub\.Hub|connection\.)ClientOptions"),
    ],
)
def test_client_options_are_validated(kind: Kind, changes: dict[str, Any], text: str) -> None:
    options = {**NEW, **changes}
    url, name, token = (options.pop(part) for part in ("url", "name", "token"))
    with pytest.raises(HeadgateError, match=text) as info:
        kind.client(url, name, token, **options)
    assert "ttt" not in str(info.value)


@both_clients
async def test_a_closed_client_and_a_too_large_message_are_refused(kind: Kind) -> None:
    client = kind.client("https://hub.example/below/", "alice", "t")
    assert client.url == f"wss://hub.example/below{kind.path}"
    assert kind.client("http://hub.example", "alice", "t").url == f"ws://hub.example{kind.path}"
    with pytest.raises(HeadgateError, match="expected an open client; use it with `async with`"):
        await kind.send(client, "bob", "")
    with pytest.raises(Refused, match="too_large: expected at most 65536 bytes, got 65"):
        await kind.send(client, "bob", "x" * 65_530)


async def test_messages_are_validated_before_they_are_sent() -> None:
    client = RelayClient("https://hub.example", "alice", "t")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"to": "bob", "body": "text"}, "body: expected bytes; encode text"),
        ({"to": "", "body": b""}, "agent: expected 1 to 128 printable characters"),
        ({"to": "bob", "body": b"", "content_type": b"text"}, "content_type: expected text"),
        ({"to": "bob", "body": b"", "in_reply_to": 7}, "in_reply_to: expected text"),
    ]
    for given, text in wrong:
        with pytest.raises(InvalidInput, match=text):
            await client.send(**given)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("websockets.asyncio.client", "expected the package websockets"),
        ("google.protobuf", "expected the package prot"),
    ],
)
def test_a_package_that_is_missing_is_named(missing: str, text: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from headgate.client import Denial, RelayClient"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert text in found.stderr
    assert "in a checkout: pip install '.[client]'" in found.stderr


@both_clients
@with_hub()
async def test_an_address_without_a_hub_raises(hub: HubServer, kind: Kind) -> None:
    with pytest.raises(Refused, match=r"unknown_route: .*there is no such socket; agents connect to /ws"):
        async with kind.client(f"http://{hub}/elsewhere", "alice", "token"):
            pass


@both_clients
@with_hub()
async def test_the_url_may_name_the_socket_as_the_hub_shows_it(hub: HubServer, kind: Kind) -> None:
    token = hub.register("alice")
    for url in (f"http://{hub}", f"HTTP://{hub}", f"ws://{hub}{kind.path}", f"ws://{hub}{kind.path}/"):
        async with kind.client(url, "alice", token) as client:
            assert client.url == f"ws://{hub}{kind.path}"


@both_clients
@with_hub()
async def test_a_redirect_is_not_followed(hub: HubServer, kind: Kind) -> None:
    token = hub.register("alice")
    here = f"HTTP/1.1 302 Found\r\nLocation: ws://{hub}{kind.path}\r\nContent-Length: 0\r\n\r\n"

    async def send_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(here.encode())
        writer.close()

    async with await asyncio.start_server(send_away, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Refused, match="status_302"):
            async with kind.client(f"http://127.0.0.1:{port}", "alice", token):
                pass


@both_clients
def test_tls_needs_a_trusted_hub(kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, trusted = tmp_path / "certificate.pem", tmp_path / "authority.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(trusted))

    async def main() -> None:
        client = kind.client(f"https://{hub}", "alice", token)
        async with client:
            assert client.connected

    with hub_server(tls_certificate=certificate) as hub:
        token = hub.register("alice")
        with pytest.raises(Refused, match=rf"certificate: wss://.*{kind.path}: it isn't trusted: "):
            run(main())
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        run(main())
