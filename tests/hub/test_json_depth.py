"""JSON that is nested deeply: bounded before it is stored, so that whatever is stored can be read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Policy
from headgate.hub.errors import RequestError
from headgate.hub.json_bounds import MAX_DEPTH, TOO_DEEP, check_depth
from tests.support.agent_connections import overfill, slow_reader
from tests.support.hub import ADMIN, hub_server
from tests.support.valkey import wait_for


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def depth_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def accepted(text: str) -> bool:
    try:
        check_depth(text)
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("wide", [0, 10_000])
def test_64_levels_are_accepted_and_65_are_not(wide: int) -> None:
    siblings = "[{}]," * wide
    for opened, closed in (("[", "]"), ('{"a":', "}"), ('[{"[":', "}]")):
        levels = MAX_DEPTH - 1 if len(opened) < 6 else MAX_DEPTH // 2 - 1
        inner = opened * levels + "1" + closed * levels
        assert depth_of(json.loads(f"[{siblings}{inner}]")) in (MAX_DEPTH, MAX_DEPTH - 1)
        assert accepted(f"[{siblings}{inner}]")
        assert not accepted(f"[{siblings}[[{inner}]]]")


def test_brackets_in_strings_are_not_levels() -> None:
    for text in ("[" * 1000, "]{" * 500, '\\"[', "\\\\", '"' * 200 + "[" * 200):
        assert accepted(json.dumps([text, {text: "["}]))


_json = st.recursive(
    st.none() | st.text(alphabet='[]{}"\\a', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[]{}"\\', max_size=4), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(_json, st.integers(0, 70))
def test_it_agrees_with_a_parser(value: object, more: int) -> None:
    for _ in range(more):
        value = [value]
    assert accepted(json.dumps(value)) == (depth_of(value) <= MAX_DEPTH)


BODIES = {
    "message": {"to": "friend", "body": 0},
    "channel_publish": {"channel": "general", "body": 0},
    "task_complete": {"task_id": "1", "result": 0},
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_frame_that_is_nested_too_deeply_is_invalid_and_nothing_is_stored(kind: str) -> None:
    with hub_server() as hub, hub.agent("planner") as planner:
        hub.register("friend")
        text = json.dumps({"type": kind, "id": 7, **BODIES[kind]})
        planner.socket.send(text.replace(" 0}", f" {nested(987)}}}"))
        assert planner.hear()["detail"] == TOO_DEEP
        planner.socket.send(text.replace(" 0}", f" {nested(MAX_DEPTH)}}}"))
        assert planner.hear() == {"type": "error", "error": "invalid", "detail": TOO_DEEP, "id": 7}
        assert hub.hub.messages.accepted == 0


@pytest.mark.parametrize("path", ["/api/tasks", "/api/messages", "/api/channels/general/publish"])
def test_a_body_that_is_nested_too_deeply_is_refused(path: str) -> None:
    name = "payload" if path == "/api/tasks" else "body"
    with hub_server() as hub, hub.http(hub.register("planner")) as http:
        to = '"to": "planner", ' if path == "/api/messages" else ""
        for depth in (MAX_DEPTH, 984, 20_000):
            answer = http.post(path, content=f'{{{to}"{name}": {nested(depth)}}}')
            assert (answer.status_code, answer.json()["error"]) == (400, "invalid")
            assert TOO_DEEP in answer.json()["detail"]
        assert http.post(path, content=f'{{{to}"{name}": {nested(63)}}}').status_code in (200, 201)


def test_an_admins_task_is_bounded_too() -> None:
    with hub_server() as hub, hub.http(ADMIN) as http:
        assert http.post("/api/admin/tasks", content=f'{{"payload": {nested(984)}}}').status_code == 400
        assert hub.hub.scheduler.counts()["queued"] == 0


def test_undelivered_messages_are_kept_as_they_came_and_survive_a_full_disk() -> None:
    with hub_server(Policy(exempt=["planner"])) as hub, hub.agent("planner") as planner:
        token = hub.register("slow")
        with slow_reader(hub, "slow", token) as slow:
            taken = overfill(planner, slow)
            before = hub.run(hub.hub.messages.waiting("slow"))

            def pages(most: str) -> None:
                hub.run(hub.hub.database.run(lambda db: db.execute(f"PRAGMA max_page_count={most}").close()))

            pages("1")  # SQLite takes the present size instead
            slow.socket.socket.close()
            wait_for(lambda: not hub.hub.presence.is_connected("slow"), "the slow reader to be gone")
            wait_for(lambda: hub.hub.messages._unwritten_bytes > 0, "the messages to wait in memory")
            assert hub.run(hub.hub.messages.waiting("slow")) == before
            pages("1000000")
        hub.clock.advance(1)
        wait_for(lambda: hub.hub.messages._unwritten_bytes == 0, "the messages to be written")
        kept = hub.run(hub.hub.messages.mail("slow", 100))
        kept += hub.run(hub.hub.messages.mail("slow", 100, kept[-1].number))
        numbers = sorted(json.loads(bytes(mail.body))[0] for mail in kept)
        assert numbers == list(range(numbers[0], taken + 1)), "all that the socket had not sent, and the one too many"
