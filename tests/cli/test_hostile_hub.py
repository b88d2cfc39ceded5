"""The commands that call a hub, against servers that answer with anything, or never to the end."""

import gzip
import inspect
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme

from headgate.cli import build_parser, check, hub_api
from headgate.cli.hub_api import HubApi, HubError
from headgate.cli.hub_options import hub_from
from tests.support.cli import Command, leaf_commands
from tests.support.hub_answers import ANSWERS, CARD
from tests.support.scripted_server import scripted_server
from tests.support.valkey import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.once]


def words(command: str) -> list[str]:
    """A command and its arguments."""
    return [*[word for word in command.split() if not word.isupper()], *ANSWERS[command][0]]


SUMMARY = {
    "violations_last_hour": 1, "worst_offenders": [{"agent_id": "a", "violations": 1}], "exempt": 0,
    "checks_per_second": 1.5, "denied_share": 0.5, "store": "memory",
}  # fmt: skip
STATE = {"agents": [CARD], "summary": SUMMARY}

MARK = "@mark@"
DEEP = "[" * 10_000 + "]" * 10_000
ABSURD = {
    "a float too large": "1e400",
    "a float too small": "-1e400",
    "no number": "NaN",
    "infinite": "-Infinity",
    "an integer too large for a float": "9" * 400,
    "an integer too long": "9" * 5000,
    "deep": DEEP,
    "as deep as Python can bear": "[" * 900 + "]" * 900,
    "objects": '{"":' * 10_000 + "1" + "}" * 10_000,
}
"""JSON that no hub sends, wherever it stands."""
ODD = ['"nan"', '"1e400"', '"\\ud800"', "null", "true", "-1", "[[]]", '{"a": {"a": 1}}', '""']
"""JSON that is wrong in most places, and right in some."""
NOT_A_HUB = "expected the answer of a headgate hub, got something else; is the address right?"


def values_with_mark(value: Any) -> Iterator[Any]:
    """A JSON value with a mark in place of each of its parts in turn, the whole included."""
    yield MARK
    if isinstance(value, dict):
        for name, part in value.items():
            yield from ({**value, name: one} for one in values_with_mark(part))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from ([*value[:place], one, *value[place + 1 :]] for one in values_with_mark(part))


def fill(template: Any, text: str) -> bytes:
    return json.dumps(template).replace(json.dumps(MARK), text).encode()


class Hub:
    """A server whose answer changes. The last one stays."""

    def __init__(self, where: object, replace: Callable[[bytes], object]) -> None:
        self.url, self.answer = f"http://{where}", replace


@pytest.fixture
def hub() -> Iterator[Hub]:
    answers: dict[str, Any] = {}

    class Answers(dict[str, tuple[int, Any]]):
        def get(self, _path: str, _default: Any = None) -> Any:
            return 200, answers["now"]

    with scripted_server(answers=Answers()) as one:
        yield Hub(one, lambda body: answers.update(now=body))


def refusal(command: str, hub: str, text: str) -> tuple[int, str, str]:
    """What a command ends with if there is no answer."""
    if command == "check":
        return 3, "", f"headgate check: undecided: {hub}: {text}\n"
    return 1, "", f"{hub}: {text}\n"


def test_every_command_that_calls_a_hub_is_in_the_table() -> None:
    calling = {
        name for name, actions in leaf_commands(build_parser()) if any("--hub" in one.option_strings for one in actions)
    }
    assert calling == {*ANSWERS, "top"} - {"agents AGENT"}


@pytest.mark.parametrize("command", ANSWERS)
def test_what_a_hub_answers_is_printed(headgate: Command, hub: Hub, command: str) -> None:
    hub.answer(json.dumps(ANSWERS[command][1]).encode())
    for more in ([], ["--json"]):
        code, out, err = headgate(*words(command), "--hub", hub.url, *more)
        assert code == (1 if command == "check" else 0)
        assert out
        assert not err or (not more and err.startswith("note: ") and err.count("\n") == 1)


@pytest.mark.parametrize("text", ABSURD.values(), ids=ABSURD)
def test_absurd_json_is_not_an_answer_of_a_hub(headgate: Command, hub: Hub, text: str) -> None:
    for number, (command, (_, good)) in enumerate(ANSWERS.items()):
        template = {**good, "more": MARK} if number % 2 else {**good, next(reversed(good)): MARK}
        hub.answer(fill(template, text))
        given = [*words(command), "--hub", hub.url]
        assert headgate(*given, "--json") == refusal(command, hub.url, NOT_A_HUB)
        assert headgate(*given) == refusal(command, hub.url, NOT_A_HUB)


def test_an_answer_that_goes_on_after_the_largest_is_none(
    headgate: Command, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.cli.answers.MAX_ANSWER", 10_000)
    arguments, good = ANSWERS["check"]
    hub.answer(json.dumps(good).ljust(10_000).encode() + b"garbage")
    assert headgate("check", *arguments, "--hub", hub.url) == refusal("check", hub.url, NOT_A_HUB)


@pytest.mark.parametrize("command", ANSWERS)
def test_an_answer_that_is_wrong_in_one_place_is_no_traceback(headgate: Command, hub: Hub, command: str) -> None:
    for number, template in enumerate(values_with_mark(ANSWERS[command][1])):
        for text in [ODD[(number + more) % len(ODD)] for more in range(0, len(ODD), 3)]:
            hub.answer(fill(template, text))
            code, out, err = headgate(*words(command), "--hub", hub.url)
            assert all(line.isprintable() for line in (out + err).split("\n")), (template, text)
            if code not in ((0, 1) if command == "check" else (0,)) or not out:
                assert (code, out, err) == refusal(command, hub.url, NOT_A_HUB), (template, text)


@pytest.mark.parametrize("command", ["register", "rotate", "invite", "admins add"])
@pytest.mark.parametrize(
    "token", ["", "short", "hg_0123456789abcdef\nhg_", "hg_0123456789abcdef\x1b[2J", "hg 0123456789abcdef"]
)
def test_a_token_that_cannot_be_one_is_not_printed(headgate: Command, hub: Hub, command: str, token: str) -> None:
    hub.answer(json.dumps({"token": token, "invitation": token}).encode())
    assert headgate(*words(command), "--hub", hub.url) == refusal(command, hub.url, NOT_A_HUB)


@pytest.mark.parametrize("command", ANSWERS)
def test_an_answer_without_its_fields_changed_nothing(headgate: Command, hub: Hub, command: str) -> None:
    for body in (b"{}", b"[]", b"null", b'"a"', b"", b"\xff", b"<html>", gzip.compress(b"0" * 10_000_000)):
        hub.answer(body)
        found = headgate(*words(command), "--hub", hub.url, "--json")
        assert found == refusal(command, hub.url, NOT_A_HUB), body[:10]


def test_top_survives_any_answer(hub: Hub) -> None:
    api = HubApi(hub.url, "a token", "", timeout=PATIENCE)
    hub.answer(json.dumps(STATE).encode())
    assert api.status().agents[0].name == "a"
    texts = [*ABSURD.values(), *ODD]
    for number, template in enumerate(values_with_mark(STATE)):
        for text in (texts[number % len(texts)], ODD[number % len(ODD)], '"nan"'):
            hub.answer(fill(template, text))
            with suppress(HubError):
                for agent in api.status().agents:
                    assert agent.used is None or -1e30 <= agent.used <= 1e30


# Pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["a", "a"], [""], ["x" * 129], ["\ud800" * 129]])
def test_pages_that_go_nowhere_end(headgate: Command, names: list[str]) -> None:
    page = {"agents": [{**CARD, "agent_id": name} for name in names]}
    asked = 0

    class Pages(dict[str, tuple[int, Any]]):
        def get(self, path: str, _default: Any = None) -> Any:
            nonlocal asked
            asked += "after=" in path
            return 200, page if asked < 10 else {"agents": []}  # whoever goes on for long comes to an end here

    with scripted_server(answers=Pages()) as one:
        found = headgate("agents", "--all", "--hub", f"http://{one}")
        assert found == refusal("agents", f"http://{one}", NOT_A_HUB)
        assert asked < 3


def test_pages_that_never_end_are_bounded(headgate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_api, "_MOST_LISTED", 25)
    pages = 0

    class Endless(dict[str, tuple[int, Any]]):
        def get(self, path: str, _default: Any = None) -> Any:
            nonlocal pages
            if "after=" not in path:
                return 200, {"agents": []} if "state" in path else CARD
            pages += 1
            return 200, {"agents": [{"agent_id": f"\ud800{pages:09}{number}"} for number in range(10)]}

    with scripted_server(answers=Endless()) as one:
        text = "expected at most 25 agents, got more"
        assert headgate("agents", "--all", "--hub", f"http://{one}") == (1, "", f"http://{one}: {text}\n")
    assert pages == 3


# Below JSON -----------------------------------------------------------------------------------------------------------


@contextmanager
def raw_server(answer: Callable[[socket.socket], object], *, takes_request: bool = True) -> Iterator[str]:
    """The URL of a server that reads a request, if it does, and then does anything with the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.settimeout(PATIENCE)
                        if takes_request:
                            connection.recv(65536)
                        answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "http://{}:{}".format(*listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


OK, BAD = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 500 Oh\r\n"
RAW = {
    "nothing": b"",
    "no HTTP": b"\x00\xff" * 100,
    "a status that is no number": b"HTTP/1.1 abc\r\n\r\n",
    "a status beyond all": b"HTTP/1.1 999 Oh\r\n\r\n",
    "cut in its headers": OK + b"Content-Le",
    "cut in its body": OK + b"Content-Length: 100\r\n\r\n{}",
    "cut in a chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n64\r\n{}",
    "a chunk without a size": OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    "an error cut in a chunk": BAD + b"Transfer-Encoding: chunked\r\n\r\n64\r\n{}",
    "an error without the size of a chunk": BAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n{}",
    "an error that is deep": BAD + b"\r\n" + DEEP.encode(),
    "an error with an absurd detail": BAD + b'\r\n{"detail": 1e400}',
    "an error in gzip": BAD + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"0" * 1_000_000),
    "too many headers": OK + b"A: b\r\n" * 1000 + b"\r\n",
    "a header without an end": OK + b"A: " + b"b" * 100_000,
    "a negative length": OK + b"Content-Length: -5\r\n\r\n{}",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a redirect to anything": b"HTTP/1.1 302 Found\r\nLocation: \xff\x1b[2J\r\n\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
}


@pytest.mark.parametrize("answer", RAW.values(), ids=RAW)
def test_what_is_no_http_is_an_error_in_one_line(headgate: Command, answer: bytes) -> None:
    with raw_server(lambda connection: connection.sendall(answer)) as url:
        for command in ("exempt list", "check"):
            code, out, err = headgate(*words(command), "--hub", url)
            assert (code, out) == refusal(command, url, "")[:2]
            assert err.startswith(refusal(command, url, "")[2].removesuffix("\n"))
            assert err.count("\n") == 1
            assert err.removesuffix("\n").isprintable()


def test_time_is_bounded_over_tls_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority, context = trustme.CA(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))

    def secured(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(65536)
            send_slowly(secure, **DRIPS["the body"])

    def mute(connection: socket.socket) -> None:
        while connection.recv(65536):
            pass

    for answer in (secured, mute):
        refused = pytest.raises(HubError, match=r"got: no answer within 0\.5 s; is it running\?")
        with raw_server(answer, takes_request=False) as url, refused:
            HubApi(url.replace("http:", "https:"), "a token", "", timeout=0.5).exemptions()


def send_slowly(connection: socket.socket, *, begin: bytes, more: bytes, end: bytes) -> None:
    """Send something now and then, often enough for every single read, and in the end all that was missing."""
    connection.sendall(begin)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        connection.sendall(more)
        time.sleep(0.02)  # what a slow server does
    connection.sendall(end)


GOOD = b'{"agents": []}'
DRIPS = {
    "the status": {"begin": b"", "more": b"HTTP/1.1 100 Continue\r\n\r\n", "end": OK + b"\r\n" + GOOD},
    "a header": {"begin": OK + b"A: ", "more": b"b", "end": b"\r\n\r\n" + GOOD},
    "the body": {"begin": OK + b"\r\n", "more": b" ", "end": GOOD},
    "chunks": {
        "begin": OK + b"Transfer-Encoding: chunked\r\n\r\n",
        "more": b"1\r\n \r\n",
        "end": b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD),
    },
    "the body of an error": {"begin": BAD + b"\r\n", "more": b" ", "end": b'{"detail": "late"}'},
}


@pytest.mark.parametrize("parts", DRIPS.values(), ids=DRIPS)
def test_a_request_is_bounded_in_time_as_a_whole(parts: dict[str, bytes]) -> None:
    with raw_server(lambda connection: send_slowly(connection, **parts)) as url, pytest.raises(HubError) as caught:
        HubApi(url, "a token", "", timeout=0.3).exemptions()
    if parts["begin"].startswith(BAD):  # its status says enough
        assert str(caught.value).endswith("got HTTP status 500; is the address right?")
    else:
        assert str(caught.value).endswith("got: no answer within 0.3 s; is it running? (--hub, HEADGATE_HUB)")


def test_ten_seconds_is_the_bound_that_the_docs_name() -> None:
    """The other tests don't wait for so long."""
    bounds = [inspect.signature(one).parameters["timeout"].default for one in (HubApi, hub_from)]
    assert [*bounds, check._WITHIN] == [10.0] * 3
    docs = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")
    assert "A request may take 10 seconds in all" in docs
    assert "undecided after 10 seconds" in docs


@pytest.mark.parametrize("command", ["exempt list", "check"])
def test_a_slow_answer_is_none(headgate: Command, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(hub_from, "__kwdefaults__", {"viewer": False, "timeout": 0.3})
    with raw_server(lambda connection: send_slowly(connection, **DRIPS["a header"])) as url:
        text = "expected a hub that answers, got: no answer within 0.3 s; is it running? (--hub, HEADGATE_HUB)"
        assert headgate(*words(command), "--hub", url) == refusal(command, url, text)


# A server instead of a hub --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_server_that_answers_by_drips_decides_nothing(headgate: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_WITHIN", 0.5)
    with raw_server(lambda connection: send_slowly(connection, begin=b"+", more=b"a", end=b"\r\n")) as url:
        store = url.replace("http:", "redis:")
        text = "--store: expected a server that decides, got no decision within 0.5 s"
        expected = (3, "", f"headgate check: undecided: {text}\n")
        assert headgate("check", "a", "--limit", "1/s", "--store", store) == expected


@pytest.mark.parametrize(
    "answer", [b"$-1\r\n", b"*0\r\n", b":1\r\n", b"+OK\r\n", b"-ERR no\r\n", b"\xff\r\n", b"*1\r\n" * 9999]
)
def test_a_server_that_answers_with_anything_decides_nothing(headgate: Command, answer: bytes) -> None:
    def repeat(connection: socket.socket) -> None:
        connection.sendall(answer)
        while connection.recv(65536):
            connection.sendall(answer)

    with raw_server(repeat) as url:
        for more in (["--limit", "1/s"], ["--tier", "light"]):
            code, out, err = headgate("check", "a", *more, "--store", url.replace("http:", "redis:"))
            assert (code, out, err.count("\n")) == (3, "", 1)
            assert err.startswith("headgate check: undecided: ")


# Hosts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example"])
def test_a_host_that_is_none_is_an_error(headgate: Command, host: str) -> None:
    code, out, err = headgate("exempt", "list", "--hub", f"http://{host}")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"http://{host}: expected a hub that answers, got: ")
