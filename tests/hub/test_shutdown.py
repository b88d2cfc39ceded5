"""Graceful shutdown: requests in flight finish, and every connection is told when to reconnect."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import Connection

import pytest

from headgate import Policy
from tests.support.agent_connections import overfill, read_close, slow_reader
from tests.support.hub import HubServer, hub_server
from tests.support.valkey import PATIENCE, wait_for


@contextmanager
def blocked_database(hub: HubServer) -> Iterator[Callable[[], None]]:
    """While whatever the hub writes has to wait; the function that lets it go on."""
    held, go_on = threading.Event(), threading.Event()

    def wait(_db: Connection) -> None:
        held.set()
        go_on.wait()

    waiting = hub.hub.database.run(wait)
    with ThreadPoolExecutor(1) as other:
        done = other.submit(hub.run, waiting)
        assert held.wait(PATIENCE)
        try:
            yield go_on.set
        finally:
            go_on.set()
            done.result()


@contextmanager
def stopping_hub(hub: HubServer) -> Iterator[None]:
    """While a hub is about to stop, as after a signal; it has stopped in the end."""
    with ThreadPoolExecutor(1) as other:
        stopped = other.submit(hub.stop)
        wait_for(lambda: hub.hub.health.stopping, "the hub to begin to stop")
        yield
        stopped.result()


def test_every_connection_is_told_when_to_reconnect() -> None:
    with hub_server() as hub, hub.agent("one") as one, hub.agent("two") as two, hub.socket() as stranger:
        stranger.ask("ping")
        with stopping_hub(hub):
            for wire in (one, two):
                goodbye = wire.hear()
                assert goodbye.keys() == {"type", "retry_after_ms"}
                assert (goodbye["type"], 1000 <= goodbye["retry_after_ms"] <= 5000) == ("going_away", True)
                assert read_close(wire) == (1012, f"restarting; retry in {goodbye['retry_after_ms']} ms")
            assert read_close(stranger)[0] == 1012


@pytest.fixture
def _slow_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that ends takes its time."""
    monkeypatch.setattr("headgate.hub.app._GOODBYE_TIMEOUT", PATIENCE)


@pytest.mark.usefixtures("_slow_shutdown")
def test_a_request_in_progress_is_answered_before_the_close() -> None:
    with hub_server() as hub, hub.agent("planner") as wire:
        hub.register("friend")
        with blocked_database(hub) as let_go:
            wire.say("message", to="friend", body=1, id=7)
            (socket,) = hub.hub.presence.sockets_of("planner")
            wait_for(socket.busy.locked, "the message to be handled")
            with stopping_hub(hub):
                let_go()
                assert wire.hear() == {"type": "message_sent", "to": "friend", "delivered": False, "id": 7}
                assert wire.hear()["type"] == "going_away"
                assert read_close(wire)[0] == 1012


@pytest.mark.usefixtures("_slow_shutdown")
def test_http_requests_in_flight_finish_and_a_stopping_hub_is_not_ready() -> None:
    with hub_server(shutdown_within=PATIENCE) as hub, hub.agent("planner") as wire, ThreadPoolExecutor(1) as other:
        hub.register("friend")
        with hub.http(hub.register("caller")) as caller, hub.http() as probe:
            assert probe.get("/ready").json() == {"status": "ready"}
            with blocked_database(hub) as let_go:
                in_flight = other.submit(caller.post, "/api/messages", json={"to": "friend", "body": 1})
                wire.say("message", to="friend", body=1)  # which the hub waits for before it closes anything
                (socket,) = hub.hub.presence.sockets_of("planner")
                wait_for(socket.busy.locked, "the message to be handled")
                assert hub.server is not None
                tasks = hub.server.server_state.tasks
                wait_for(lambda: len(tasks) == 2, "the request to be handled")
                with stopping_hub(hub):
                    ready = probe.get("/ready")
                    assert (ready.status_code, ready.headers["retry-after"]) == (503, "5")
                    assert ready.json() == {"error": "stopping", "detail": "the hub is stopping"}
                    assert probe.get("/live").status_code == 200
                    assert probe.get("/health").json()["status"] == "stopping"
                    let_go()
                    assert in_flight.result().json() == {"to": "friend", "delivered": False}
                    assert wire.hear()["type"] == "message_sent"


def test_a_request_that_does_not_end_delays_the_stop_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.hub.app._GOODBYE_TIMEOUT", 0.05)
    with hub_server() as hub, hub.agent("planner") as wire, blocked_database(hub) as let_go:
        wire.say("session_open", session=1)
        (socket,) = hub.hub.presence.sockets_of("planner")
        wait_for(socket.busy.locked, "it to be handled")
        with stopping_hub(hub):
            assert read_close(wire)[0] == 1012
            let_go()


def test_a_request_that_the_stop_cancels_is_not_logged_as_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    with (
        hub_server(shutdown_within=1) as hub,
        hub.unfinished_post(hub.register("caller"), "/api/messages", {"to": "a"}),
    ):
        hub.stop()
    assert "Cancel 1 running task(s), timeout graceful shutdown exceeded" in caplog.text
    assert [record.message for record in caplog.records if record.exc_info] == []
    assert "ASGI callable" not in caplog.text


@pytest.mark.long
def test_a_slow_reader_does_not_delay_the_stop_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.hub.app._GOODBYE_TIMEOUT", 0.05)
    policy = Policy(exempt=["planner"])
    with hub_server(policy, data=tmp_path, max_waiting=4, shutdown_within=1) as hub, hub.agent("planner") as planner:
        token = hub.register("slow")
        with slow_reader(hub, "slow", token) as slow:
            sent = overfill(planner, slow)
            hub.stop()
    with hub_server(data=tmp_path) as hub, hub.http(token) as http:
        bodies = [message["body"][0] for message in http.get("/api/mailbox").json()["messages"]]
        assert bodies == [sent, *range(sent - 4, sent)]
