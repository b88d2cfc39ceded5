"""Retries of webhooks: how often, with which delays, and once more at shutdown."""

import asyncio
import random
import socket
import time
from contextlib import suppress
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import pytest

from headgate import ManualClock
from headgate.hub.monitoring import webhooks as module
from headgate.hub.monitoring.webhooks import Webhooks
from tests.support.event_loop import wait_until
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE
from tests.support.webhook_receiver import WebhookReceiver
from tests.support.webhooks import SECRET, RecordingClock, alert, started_webhooks

TIMEOUT = module._TIMEOUT
pytestmark = pytest.mark.usefixtures("without_proxies", "patient")


def hang_up(_connection: socket.socket) -> None: ...


def send_garbage(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")


def send_endless_headers(connection: socket.socket) -> None:
    """Headers without end: something comes all the time, and never the last of it."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    with suppress(OSError):
        while True:
            connection.sendall(b"X: x\r\n")
            time.sleep(0.01)


async def test_b8_temporary_failures_are_retried(receiver: WebhookReceiver, logged: list[Any]) -> None:
    answers: list[Any] = [408, 425, 429, 500, 502, 503, 504, 599, hang_up, send_garbage]
    receiver.answers.extend(answers)
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        webhooks.send("alert.raised", alert())
        for tries in range(1, len(answers) + 1):
            await clock.wait_for_waits(tries)
            assert (webhooks.waiting, webhooks.delivered, webhooks.failed) == (1, 0, 0), answers[tries - 1]
            clock.advance(30)
        await wait_until(lambda: webhooks.delivered, "it")
        assert (webhooks.waiting, webhooks.failed, len(receiver.heard)) == (0, 0, len(answers) + 1)
        webhooks.send("alert.raised", alert())
        await wait_until(lambda: webhooks.delivered == 2, "the second")
        receiver.answers.append(500)
        webhooks.send("alert.raised", alert())
        await clock.wait_for_waits(len(answers) + 1)
        clock.advance(30)
        await wait_until(lambda: webhooks.delivered == 3, "the third")
    assert len({one.body for one in receiver.heard}) == 1, "the same each time"
    assert {one.headers["X-Headgate-Delivery"] for one in receiver.heard} == {"0123abcd-1-raised"}
    events = [line["event"] for line in logged]
    assert events == ["a webhook could not be delivered, and is tried again", "webhooks are delivered again"] * 2


async def test_b8_timeouts_are_retried(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    """A busy machine may let a good answer come too late as well: each try is given more time than the last."""
    assert TIMEOUT == 10
    within = 0.2
    monkeypatch.setattr(module, "_TIMEOUT", within)
    receiver.answers.extend([receiver.hang, send_endless_headers])
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        webhooks.send("alert.raised", alert())
        for tries in range(1, 12):
            await wait_until(lambda tries=tries: webhooks.delivered or len(clock.waits) == tries, "a try")  # type: ignore[misc]
            if webhooks.delivered:
                break
            monkeypatch.setattr(module, "_TIMEOUT", within * 2**tries)
            clock.advance(30)
        assert "TimeoutError: no answer in time" in logged[0]["problem"]
        assert (webhooks.delivered, webhooks.waiting, webhooks.failed) == (1, 0, 0)
    assert len(receiver.heard) >= 3


async def test_retry_delays_double_up_to_thirty_seconds_with_jitter() -> None:
    random.seed(7)
    clock = RecordingClock()
    with unused_port() as port:
        async with started_webhooks(f"http://127.0.0.1:{port}", clock=clock) as webhooks:
            webhooks.send("alert.raised", alert())
            for tries in range(1, 9):
                await clock.wait_for_waits(tries)
                clock.advance(clock.waits[-1])
            longest = [1, 2, 4, 8, 16, 30, 30, 30]
            await clock.wait_for_waits(9)
            pairs = list(zip(clock.waits, longest, strict=False))
            assert all(most / 2 <= wait <= most for wait, most in pairs), pairs
            assert len({wait / most for wait, most in pairs}) == len(pairs), "not all hubs come back at the same time"
            webhooks.send("alert.resolved", alert())
            assert webhooks.waiting == 2


ASKED = [
    ("7", 7, 7),
    ("0", 0.5, 1),
    ("299", 299, 299),
    ("86400", 300, 300),
    ("9" * 5000, 0.5, 1),
    ("-5", 0.5, 1),
    ("soon", 0.5, 1),
    ("", 0.5, 1),
    ("in 40 s", 40, 40),
    ("in -40 s", 0.5, 1),
    ("in 90000 s", 300, 300),
    ("Fri, 31 Dec 99999 23:59:59 GMT", 0.5, 1),
]


async def test_b8_retry_after_is_respected_within_bounds(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.time())
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now))  # or a date would come nearer meanwhile
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        for number, (asked, low, high) in enumerate(ASKED, 1):
            date = formatdate(now + float(asked.split()[1]), usegmt=True) if "in " in asked else asked
            receiver.answers.append((429 if number % 2 else 503, {"Retry-After": date}))
            webhooks.send("alert.raised", alert())
            await clock.wait_for_waits(number)
            assert low <= clock.waits[-1] <= high, asked
            clock.advance(clock.waits[-1])
            await wait_until(lambda number=number: webhooks.delivered == number, "it")  # type: ignore[misc]


async def test_b8_a_webhook_is_given_up_after_an_hour_and_the_next_is_sent(
    receiver: WebhookReceiver, logged: list[Any]
) -> None:
    receiver.answers.extend([500, 500, 500])
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        webhooks.send("alert.raised", alert("old"))
        await clock.wait_for_waits(1)
        clock.advance(3599)
        webhooks.send("alert.raised", alert("new"))
        await clock.wait_for_waits(2)
        assert webhooks.failed == 0
        clock.advance(1)
        if not webhooks.failed:
            clock.advance(30)
        await wait_until(lambda: webhooks.delivered == 1, "the new one")
        assert (webhooks.failed, webhooks.waiting) == (1, 0)
    assert [agent for _, agent in receiver.events] == ["old"] * 3 + ["new"]
    given_up = [line for line in logged if line["event"] == "webhooks are given up"]
    assert [(line["many"], line["problem"]) for line in given_up] == [(1, "status 500")]


# The end --------------------------------------------------------------------------------------------------------------


async def test_b8_stopping_tries_queued_webhooks_once_more(receiver: WebhookReceiver, logged: list[Any]) -> None:
    receiver.answers.append(503)
    clock = RecordingClock()
    async with started_webhooks(receiver.url, clock=clock) as webhooks:
        for number in range(5):
            webhooks.send("alert.raised", alert(str(number)))
        await clock.wait_for_waits(1)
    assert (webhooks.delivered, webhooks.failed, webhooks.waiting) == (5, 0, 0)
    assert [agent for _, agent in receiver.events] == ["0", "0", "1", "2", "3", "4"]


async def test_b8_stopping_retries_a_webhook_in_flight_once(receiver: WebhookReceiver) -> None:
    def fails(connection: socket.socket) -> None:
        receiver.let_go.wait()
        connection.sendall(b"HTTP/1.1 503 Wait\r\nRetry-After: 60\r\nContent-Length: 0\r\n\r\n")

    receiver.answers.append(fails)
    began = time.monotonic()
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.send("alert.raised", alert())
        await wait_until(lambda: receiver.heard, "the request")
        webhooks.hurry()
        receiver.let_go.set()
    assert (webhooks.delivered, webhooks.failed, len(receiver.heard)) == (1, 0, 2)
    assert time.monotonic() - began < PATIENCE


async def test_b8_stopping_does_not_wait_for_an_absent_receiver(logged: list[Any]) -> None:
    began = time.monotonic()
    clock = RecordingClock()
    with unused_port() as port:
        async with started_webhooks(f"http://127.0.0.1:{port}", clock=clock) as webhooks:
            for number in range(5):
                webhooks.send("alert.raised", alert(str(number)))
            await clock.wait_for_waits(1)
    assert (webhooks.delivered, webhooks.failed, webhooks.waiting) == (0, 5, 0)
    assert (logged[-1]["event"], logged[-1]["many"]) == ("webhooks are given up", 5)
    assert time.monotonic() - began < PATIENCE


async def test_b8_stopping_waits_for_a_hanging_receiver_within_bounds(
    receiver: WebhookReceiver, logged: list[Any]
) -> None:
    receiver.answers.append(receiver.hang)
    async with started_webhooks(receiver.url, within=0.1) as webhooks:
        webhooks.send("alert.raised", alert())
        webhooks.send("alert.resolved", alert())
        await wait_until(lambda: receiver.heard, "the request")
    assert (webhooks.delivered, webhooks.failed, webhooks.waiting) == (0, 2, 0)
    (line,) = logged
    assert (line["event"], line["many"], line["problem"]) == ("webhooks are given up", 2, "the hub stops")


async def test_the_time_limit_of_a_stop_starts_when_it_begins(
    receiver: WebhookReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT", 10 * PATIENCE)
    receiver.answers.append(receiver.hang)
    webhooks = Webhooks([receiver.url], SECRET, ManualClock(), 0.05)
    await webhooks.start()
    webhooks.send("alert.raised", alert())
    webhooks.hurry()
    loop = asyncio.get_running_loop()
    over = loop.time() + 0.05
    await wait_until(lambda: loop.time() > over, "the time to be up")
    webhooks._within = 10 * PATIENCE
    await asyncio.wait_for(webhooks.close(), PATIENCE)
    assert webhooks.failed == 1


async def test_webhooks_sent_while_stopping_are_delivered(receiver: WebhookReceiver) -> None:
    async with started_webhooks(receiver.url) as webhooks:
        webhooks.hurry()
        webhooks.send("alert.raised", alert("late"))
        await wait_until(lambda: webhooks.delivered == 1, "it")
        webhooks.send("alert.raised", alert("last"))
    assert [agent for _, agent in receiver.events] == ["late", "last"]
