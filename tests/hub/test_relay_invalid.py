"""The relay over real WebSockets: invalid envelopes and floods."""

import gc
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from headgate.edges.flood import DENIALS
from headgate.proto import envelope_pb2 as wire
from tests.support.relay import ACK, ERROR, GARBAGE, LIMITED, TOO_LARGE, Frame, RelayHub, sender
from tests.support.valkey import wait_for

UNREADABLE = "expected an Envelope of headgate.v1, got bytes that can't be read as one"
NOT_DATA = "expected DATA with its payload"
NOWHERE = "expected `to`, the address that it goes to"
INVALID: list[tuple[Frame, str]] = [
    (GARBAGE, UNREADABLE),
    (b"\x0a\x01\xff", UNREADABLE),
    (b"", "expected an id of 1 to 128 characters, got 0"),
    (b"\x0a\x81\x01" + b"i" * 129, "expected an id of 1 to 128 characters, got 129"),
    ("text", "expected an envelope in a binary message, got text"),
    (wire.Envelope(id="1", to="bob"), NOT_DATA),
    (wire.Envelope(id="1", to="bob", type=wire.MESSAGE_TYPE_DATA), NOT_DATA),
    (wire.Envelope(id="1", to="bob", type=wire.MESSAGE_TYPE_ACK, data=wire.Data()), NOT_DATA),
    (wire.Envelope(id="1", to="bob", type=wire.MESSAGE_TYPE_ACK, ack=wire.Ack()), NOT_DATA),
    (b"\x0a\x011\x10\x63\x22\x03bob\x62\x00", NOT_DATA),  # of type 99
    (wire.Envelope(id="1", type=wire.MESSAGE_TYPE_HELLO, hello=wire.Hello(address="bob", token="bob")), NOT_DATA),
    (wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, data=wire.Data()), NOWHERE),
]


def test_invalid_envelopes_are_answered_with_the_reason() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        for envelope, detail in INVALID:
            answer = alice.ask(envelope)
            assert (answer.type, answer.error.code, answer.error.detail) == (ERROR, "invalid", detail)
            hub.clock.advance(60)
        alice.say("bob", b"next")
        got = bob.read()
        assert (sender(got), got.data.body) == ("alice", b"next"), "and nothing came before"


def test_b9_ten_invalid_envelopes_within_a_minute_close_the_connection() -> None:
    frames: list[Frame] = [GARBAGE, "text", TOO_LARGE, wire.Envelope(id="1")] * 3
    with RelayHub(burst="20") as hub, hub.agent("alice") as alice, hub.stranger() as stranger:
        for agent in (alice, stranger):
            for frame in frames[:10]:
                assert agent.ask(frame).type == ERROR
            assert agent.read_close() == (1008, "10 invalid envelopes within a minute")
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")


def test_b9_ten_invalid_envelopes_over_more_than_a_minute_do_not_close_it() -> None:
    with RelayHub(burst="30") as hub, hub.agent("alice") as one, hub.agent("alice") as other:
        for agent in (one, other):
            for _ in range(9):
                assert agent.ask(GARBAGE).type == ERROR
        hub.clock.advance(59.999999)
        assert one.ask(GARBAGE).type == ERROR
        assert one.read_close()[0] == 1008
        hub.clock.advance(0.000001)
        for _ in range(9):
            assert other.ask(GARBAGE).type == ERROR
        assert other.say("alice").type == ACK


def test_b9_denials_never_close_and_do_not_count_as_invalid() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice:
        for _ in range(8):
            assert alice.ask(GARBAGE).type == ERROR
        alice.spend(2)
        for _ in range(15):
            assert alice.ask(GARBAGE).type == LIMITED
        hub.clock.advance(3)
        assert alice.ask(GARBAGE).type == ERROR
        alice.spend(1)
        assert alice.ask(GARBAGE).type == ERROR
        assert alice.read_close()[0] == 1008


def test_b11_a_run_of_denials_is_read_more_slowly() -> None:
    """A pause never ends early, so there is a time that it takes at least, on any machine."""
    with RelayHub() as hub, hub.agent("alice") as alice:
        alice.spend(10)
        for _ in range(9):
            assert alice.say("bob").type == LIMITED
        hub.flood_counter.connections = DENIALS // 20 - 1  # they share the denials: each gets 20 a second
        begun = time.monotonic()
        for _ in range(6):
            assert alice.say("bob").type == LIMITED
        assert time.monotonic() - begun > 0.2
        hub.clock.advance(1)
        alice.spend(1)


# Anything at all -----------------------------------------------------------------------------------------------------


def mutate(chance: random.Random, frame: bytes) -> bytes:
    """A frame with something cut out, put in, changed or said twice."""
    for _ in range(chance.randint(1, 2)):
        start, end = sorted(chance.randrange(len(frame) + 1) for _ in range(2))
        frame = chance.choice(
            [
                frame[:start] + frame[end:],
                frame[:start] + chance.randbytes(chance.randint(1, 8)) + frame[start:],
                frame[:start] + bytes([chance.randrange(256)]) + frame[start + 1 :],
                frame + frame[start:end],
            ]
        )
    return frame


def random_envelope(chance: random.Random) -> wire.Envelope:
    """Well-formed, but seldom sensible."""
    word: Callable[[], str] = lambda: chance.choice(["", "alice", "bob", "\0", "ü" * 200, "1"])  # noqa: E731
    fields: dict[str, Any] = {name: word() for name in ("id", "from", "to", "in_reply_to")}
    fields["type"] = chance.choice([*wire.MessageType.values(), 99, -1])
    payloads: list[dict[str, Any]] = [
        {},
        {"hello": wire.Hello(address=word(), token=word())},
        {"welcome": wire.Welcome(address=word())},
        {"data": wire.Data(body=chance.randbytes(chance.randrange(100)), content_type=word())},
        {"ack": wire.Ack()},
        {"error": wire.Error(code=word(), detail=word())},
        {"rate_limited": wire.RateLimited(retry_after_ms=chance.randint(-5, 5), reason=word())},
    ]
    return wire.Envelope(**fields, **chance.choice(payloads))


def fuzz(chance: random.Random, hub: RelayHub) -> bytes | str:
    kind = chance.randrange(10)
    if kind == 0:
        return chance.randbytes(chance.randrange(300))
    if kind == 1:
        return "".join(chance.choice("\0{}aü𝄞") for _ in range(chance.randrange(30)))
    if kind == 2:
        return chance.randbytes(1) * chance.randint(65_530, 65_550)
    if kind < 6:
        return random_envelope(chance).SerializeToString()
    frame = hub.data(chance.choice(["alice", "bob", "nobody"]), chance.randbytes(30)).SerializeToString()
    return frame if kind == 6 else mutate(chance, frame)


def test_fuzzed_envelopes_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered, none is passed on in another's name, and whoever sends too many bad ones is cut off."""
    chance = random.Random(5)  # the same ones each time
    answers = {ACK: 0, ERROR: 0, wire.MESSAGE_TYPE_DATA: 0}
    sent = 0
    with caplog.at_level(logging.WARNING), RelayHub(rate="off") as hub, hub.agent("bob") as bob:
        while sent < 500:
            with hub.stranger() if chance.random() < 0.2 else hub.agent("alice") as agent:
                try:
                    while sent < 500:
                        sent += 1
                        agent.socket.send(fuzz(chance, hub))
                        while (answer := agent.read()).type == wire.MESSAGE_TYPE_DATA:
                            assert sender(answer) == "alice"
                            answers[answer.type] += 1
                        answers[answer.type] += 1
                except ConnectionClosed:
                    assert agent.socket.close_code == 1008
        with hub.agent("alice") as alice:
            alice.say("bob", b"the end")
        while (got := bob.read()).data.body != b"the end":
            assert (got.type, sender(got), got.to) == (wire.MESSAGE_TYPE_DATA, "alice", "bob")
        assert min(answers.values()) > 10, "some of everything"
    gc.collect()  # a task that failed unseen speaks up when it is forgotten
    assert caplog.records == []
