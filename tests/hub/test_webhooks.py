"""Webhooks to real receivers on loopback: content, refusals, order, and hostile receivers."""

import doctest
import hashlib
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from headgate import HeadgateError, ManualClock
from headgate._version import VERSION
from headgate.hub.monitoring import webhooks as module
from headgate.hub.monitoring.denials import DeniedAction
from headgate.hub.monitoring.webhooks import Webhooks
from tests.support.event_loop import wait_until
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE
from tests.support.webhook_receiver import WebhookReceiver
from tests.support.webhooks import SECRET, RecordingClock, alert, started_webhooks

pytestmark = pytest.mark.usefixtures("without_proxies", "patient")


# What is sent ---------------------------------------------------------------------------------------------------------


def hmac_by_hand(key: bytes, message: bytes) -> str:
    """HMAC-SHA256 as RFC 2104 defines it."""
    padded = key.ljust(64, b"\0")
    inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded) + message).digest()
    return hashlib.sha256(bytes(byte ^ 0x5C for byte in padded) + inner).hexdigest()


async def test_b8_the_content_of_a_webhook(receiver: WebhookReceiver) -> None:
    async with started_webhooks(receiver.url) as webhooks:
        began = int(time.time())
        denied = (DeniedAction("ws", "ping", "light", 3, 12),)
        new = alert("pläner <b>", times=2, total=12, actions=denied, address="192.0.2.7")
        webhooks.send("alert.raised", new)
        webhooks.send("alert.resolved", alert("pläner <b>", times=2, resolved_at=1_700_000_060.25))
        await wait_until(lambda: webhooks.delivered == 2, "both")
        assert (webhooks.failed, webhooks.dropped, webhooks.waiting) == (0, 0, 0)
    raised, resolved = receiver.heard
    assert raised.path == "/alerts"
    assert raised.json() == {
        "delivery": "0123abcd-2-raised",
        "event": "alert.raised",
        "alert": {
            "alert_id": "0123abcd",
            "agent_id": "pläner <b>",
            "violations": 10,
            "within": 300.0,
            "raised_at": 1_700_000_000.5,
            "resolved_at": None,
            "times": 2,
            "total": 12,
            "actions": [{"channel": "ws", "action": "ping", "tier": "light", "last_minute": 3, "last_hour": 12}],
            "address": "192.0.2.7",
        },
    }
    assert resolved.json()["event"] == "alert.resolved"
    assert resolved.json()["alert"]["resolved_at"] == 1_700_000_060.25
    assert resolved.headers["Content-Type"] == "application/json"
    assert resolved.headers["User-Agent"] == f"headgate/{VERSION}"
    assert began <= int(resolved.headers["X-Headgate-Timestamp"]) <= time.time()


async def test_b8_the_signature_covers_the_time_and_the_body(receiver: WebhookReceiver) -> None:
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.send("alert.raised", alert())
        await wait_until(lambda: webhooks.delivered, "it")
    (heard,) = receiver.heard
    signed = f"{heard.headers['X-Headgate-Timestamp']}.".encode() + heard.body
    assert heard.headers["X-Headgate-Signature"] == f"sha256={hmac_by_hand(SECRET.encode(), signed)}"
    assert heard.headers["X-Headgate-Delivery"] == heard.json()["delivery"]


async def test_the_docs_show_how_to_verify_a_webhook_and_list_its_fields(receiver: WebhookReceiver) -> None:
    page = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text(encoding="utf-8")
    surroundings: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(page)[:2]:
        exec(example.source, surroundings)
    is_genuine = surroundings["is_genuine"]
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.send("alert.raised", alert())
    (heard,) = receiver.heard
    assert is_genuine(SECRET, heard.headers, heard.body)
    assert not is_genuine(f"{SECRET}!", heard.headers, heard.body)
    assert not is_genuine(SECRET, {}, heard.body)
    assert [name for name in heard.headers if name.startswith("X-") and f"`{name}`" not in page] == []
    assert [name for name in (*heard.json(), *heard.json()["alert"]) if f"`{name}`" not in page] == ["alert"]


async def test_without_a_secret_nothing_is_signed(receiver: WebhookReceiver) -> None:
    webhooks = Webhooks([receiver.url], "", ManualClock(), PATIENCE)
    await webhooks.start()
    webhooks.send("alert.raised", alert())
    await webhooks.close()
    assert "X-Headgate-Signature" not in receiver.heard[0].headers


async def test_without_receivers_nothing_is_done() -> None:
    async with started_webhooks() as webhooks:
        webhooks.send("alert.raised", alert())
        assert (webhooks.waiting, webhooks.delivered, webhooks.failed, webhooks.dropped) == (0, 0, 0, 0)


async def test_a_password_in_the_url_is_sent_and_never_logged(receiver: WebhookReceiver, logged: list[Any]) -> None:
    address = receiver.url.removeprefix("http://")
    with unused_port() as port:
        there, nowhere = f"user:a-password@{address}?key=a-key", f"u:a-password@127.0.0.1:{port}/a-key"
        async with started_webhooks(f"http://{there}", f"http://{nowhere}") as webhooks:
            receiver.answers.append(404)
            webhooks.send("alert.raised", alert())
            await wait_until(lambda: webhooks.failed == 1 and len(logged) == 2, "what is logged of both")
    assert receiver.heard[0].headers["Authorization"] == "Basic dXNlcjphLXBhc3N3b3Jk"
    assert receiver.heard[0].path == "/alerts?key=a-key"
    for secret in ("a-password", "a-key", SECRET, "user"):
        assert secret not in str(logged)
    assert {line["receiver"].startswith("http://127.0.0.1:") for line in logged} == {True}


# For good -------------------------------------------------------------------------------------------------------------


async def test_b8_a_refused_webhook_is_given_up_and_the_next_is_sent(
    receiver: WebhookReceiver, logged: list[Any]
) -> None:
    statuses = [400, 401, 403, 404, 410, 422, 499]
    receiver.answers.extend(statuses)
    async with started_webhooks(receiver.url) as webhooks:
        for number in range(8):
            webhooks.send("alert.raised", alert(str(number)))
        await wait_until(lambda: webhooks.delivered, "the last")
        assert (webhooks.failed, webhooks.waiting) == (7, 0)
    assert [agent for _, agent in receiver.events] == list("01234567")
    assert [line["problem"] for line in logged] == [f"status {status}" for status in statuses]
    assert {(line["event"], line["log_level"], line["many"]) for line in logged} == {
        ("webhooks are given up", "error", 1)
    }


async def test_b8_a_redirect_is_not_followed(receiver: WebhookReceiver, logged: list[Any]) -> None:
    statuses = [301, 302, 303, 304, 307, 308]
    with WebhookReceiver() as elsewhere:
        receiver.answers.extend([(status, {"Location": elsewhere.url}) for status in statuses])
        async with started_webhooks(receiver.url) as webhooks:
            for _ in statuses:
                webhooks.send("alert.raised", alert())
            await wait_until(lambda: webhooks.failed == 6, "the refusals")
        assert (len(receiver.heard), elsewhere.heard) == (6, [])
        told = [f"status {status}, and redirects are not followed" for status in statuses]
        assert [line["problem"] for line in logged] == told


# Many -----------------------------------------------------------------------------------------------------------------


async def test_b8_each_receiver_gets_webhooks_in_order_and_delays_no_other(receiver: WebhookReceiver) -> None:
    receiver.answers.extend([receiver.hang])
    agents = [f"agent-{number}" for number in range(20)]
    clock = RecordingClock()
    with WebhookReceiver() as flaky, WebhookReceiver() as quick:
        flaky.answers.extend([500, 200, 503])
        async with started_webhooks(receiver.url, flaky.url, quick.url, clock=clock) as webhooks:
            for agent in agents:
                webhooks.send("alert.raised", alert(agent))
            await wait_until(lambda: len(quick.heard) == 20, "those of the quick one")
            await clock.wait_for_waits(1)
            clock.advance(30)
            await clock.wait_for_waits(2)
            clock.advance(30)
            await wait_until(lambda: len(flaky.heard) == 22, "those of the flaky one")
            assert len(receiver.heard) == 1
            await wait_until(lambda: webhooks.delivered == 40, "40")
            assert webhooks.waiting == 20
            receiver.let_go.set()
            await clock.wait_for_waits(3)  # since there was no answer
            clock.advance(30)
            await wait_until(lambda: webhooks.delivered == 60, "all")
        assert [agent for _, agent in quick.events] == agents
        assert [agent for _, agent in flaky.events] == ["agent-0", *agents[:2], *agents[1:]]
        assert [agent for _, agent in receiver.events] == ["agent-0", *agents]


async def test_b8_a_full_queue_drops_the_oldest_webhooks(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    receiver.answers.append(receiver.hang)
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        webhooks.send("alert.raised", alert("0"))
        await wait_until(lambda: receiver.heard, "the first")
        for number in range(1, 9):
            webhooks.send("alert.raised", alert(str(number)))
        assert (webhooks.dropped, webhooks.waiting) == (5, 4)
        receiver.let_go.set()
        await clock.wait_for_waits(1)
        clock.advance(30)
        await wait_until(lambda: webhooks.delivered == 4, "those that are left")
        assert (webhooks.dropped, webhooks.failed, webhooks.waiting) == (5, 0, 0)
    assert [agent for _, agent in receiver.events] == ["0", "0", "6", "7", "8"]
    full = [line for line in logged if line["event"].startswith("too many webhooks wait")]
    assert [(line["log_level"], line["waiting"]) for line in full] == [("error", 3)]


# Hostile --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
    ],
)
async def test_b8_an_endless_response_is_not_read(receiver: WebhookReceiver, head: bytes) -> None:
    sent: list[int] = []

    def pours(connection: socket.socket) -> None:
        connection.sendall(head)
        sent.append(0)
        with suppress(OSError):
            while True:
                sent[0] += connection.send(b"10000\r\n" + b"x" * 65_536 + b"\r\n")

    receiver.answers.append(pours)
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.send("alert.raised", alert("one"))
        webhooks.send("alert.raised", alert("other"))
        await wait_until(lambda: webhooks.delivered == 2, "both")
    receiver.close()  # which waits until it can't send any more
    assert sent[0] < 50_000_000
    receiver._server.socket.close()


async def test_an_unexpected_error_affects_no_other_webhook(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    headers, broken = module._Receiver._headers, [True]

    def once(self: Any, delivery: Any) -> dict[str, str]:
        if broken.pop() if broken else False:
            raise KeyError("something")
        return headers(self, delivery)

    monkeypatch.setattr(module._Receiver, "_headers", once)
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.send("alert.raised", alert("one"))
        webhooks.send("alert.raised", alert("other"))
        await wait_until(lambda: webhooks.delivered, "the other")
        assert (webhooks.failed, webhooks.waiting) == (1, 0)
    assert [agent for _, agent in receiver.events] == ["other"]
    assert [line["event"] for line in logged] == ["a webhook could not be sent"]


async def test_a_receiver_with_an_untrusted_certificate_gets_nothing(
    receiver: WebhookReceiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    receiver._server.socket = context.wrap_socket(receiver._server.socket, server_side=True)
    url = receiver.url.replace("http:", "https:")
    trusted = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(trusted))
    clock = RecordingClock()
    async with started_webhooks(url, clock=clock) as webhooks:
        webhooks.send("alert.raised", alert())
        await clock.wait_for_waits(1)
    assert receiver.heard == []
    assert "CERTIFICATE_VERIFY_FAILED" in logged[0]["problem"]
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    async with started_webhooks(url) as webhooks:
        webhooks.send("alert.raised", alert())
        await wait_until(lambda: webhooks.delivered, "it, by an authority that the environment names")


async def test_a_proxy_from_the_environment_is_used(receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{receiver.port}")
    async with started_webhooks("http://alerts.example/path") as webhooks:
        webhooks.send("alert.raised", alert())
        await wait_until(lambda: webhooks.delivered, "it")
    assert receiver.heard[0].path == "http://alerts.example/path"


@pytest.mark.parametrize(("name", "value"), [("HTTP_PROXY", "gopher://a"), ("ALL_PROXY", "socks5://127.0.0.1:1")])
async def test_an_unusable_proxy_is_reported_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(HeadgateError, match=r"^webhooks: expected proxies and certificates that can be used, got: "):
        async with started_webhooks("http://alerts.example"):
            pass


@pytest.mark.parametrize("url", ["http://user:a-password@example.org/\x00", "http://a.example/" + "x" * 70_000])
async def test_an_unusable_url_is_reported_at_the_start_without_its_secrets(url: str) -> None:
    with pytest.raises(
        HeadgateError, match=r"^webhooks: expected a URL that can be used, got one to http://"
    ) as caught:
        Webhooks([url], "", ManualClock(), 5.0)
    assert "a-password" not in str(caught.value)
    assert len(str(caught.value)) < 200
