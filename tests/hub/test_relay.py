"""The relay, over real WebSockets: who may speak, how much, to whom, and what is said about the rest."""

import asyncio
import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, Self, TypeAlias
from weakref import WeakSet

import pytest
from asgi import serving
from servers import PATIENCE, wait_for
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from headgate import BLOCKED, Decision, Gate, HeadgateError, Limiter, ManualClock, MemoryStore
from headgate.errors import StoreAway
from headgate.hub.manners import DENIALS, Flood
from headgate.hub.proto import envelope_pb2 as wire
from headgate.hub.relay import Relay, relay_limiter
from headgate.hub.socket import Socket

ACK, ERROR, LIMITED = wire.MESSAGE_TYPE_ACK, wire.MESSAGE_TYPE_ERROR, wire.MESSAGE_TYPE_RATE_LIMITED
TOO_LARGE = b"x" * 65_537
GARBAGE = b"\xff\xff\xff"
Frame: TypeAlias = wire.Envelope | bytes | str


class Hub:
    """As much of a hub as a relay needs. An agent's token is its name, backwards."""

    def __init__(self, rate: str = "1.0", burst: str = "10", room: int = 256, **options: Any) -> None:
        self.clock = ManualClock(start=1000)
        self.store = MemoryStore(clock=self.clock)
        self.gate = Gate(store=self.store)
        self.tokens = {agent: agent[::-1] for agent in ("alice", "bob", "carol")}
        options = {"failed": self.gate.acheck_address, "verify": self.verify, **options}
        self.limiter = relay_limiter(rate, burst, self.store)
        self.flood = Flood()
        self.relay = Relay(**{"limiter": self.limiter, "clock": self.clock, "flood": self.flood, **options})
        self.sockets: WeakSet[Socket] = WeakSet()
        self._room = room
        self._ids = count(1)
        self._stack = ExitStack()

    async def verify(self, address: str, token: str) -> bool:
        return self.tokens.get(address) == token

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        socket = Socket(receive, send, scope["client"][0], self._room)
        self.sockets.add(socket)
        if await socket.accept():
            await self.relay.serve(socket)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.gate)
        self.server = self._stack.enter_context(serving(self.app))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def stranger(self, **options: Any) -> Iterator["Agent"]:
        """A connection that hasn't said yet whose it is."""
        with connect(f"ws://{self.server}", proxy=None, max_size=None, compression=None, **options) as socket:
            yield Agent(self, socket)

    @contextmanager
    def agent(self, name: str, **options: Any) -> Iterator["Agent"]:
        with self.stranger(**options) as agent:
            assert agent.hello(name).type == wire.MESSAGE_TYPE_WELCOME
            yield agent

    def data(self, to: str, body: bytes = b"hi", **fields: Any) -> wire.Envelope:
        payload = wire.Data(body=body, content_type="text/plain")
        return wire.Envelope(id=self.new_id(), type=wire.MESSAGE_TYPE_DATA, to=to, data=payload, **fields)

    def new_id(self) -> str:
        return f"id-{next(self._ids)}"


class Agent:
    """A client that sends one envelope and waits for its answer."""

    def __init__(self, hub: Hub, socket: ClientConnection) -> None:
        self.hub, self.socket = hub, socket

    def ask(self, envelope: Frame) -> wire.Envelope:
        self.socket.send(envelope.SerializeToString() if isinstance(envelope, wire.Envelope) else envelope)
        answer = self.read()
        if isinstance(envelope, wire.Envelope):
            assert answer.in_reply_to == envelope.id
        return answer

    def read(self) -> wire.Envelope:
        frame = self.socket.recv(timeout=PATIENCE)
        assert isinstance(frame, bytes)
        return wire.Envelope.FromString(frame)

    def hello(self, name: str, token: str | None = None) -> wire.Envelope:
        proof = wire.Hello(address=name, token=name[::-1] if token is None else token)
        return self.ask(wire.Envelope(id=self.hub.new_id(), type=wire.MESSAGE_TYPE_HELLO, hello=proof))

    def say(self, to: str, body: bytes = b"hi") -> wire.Envelope:
        return self.ask(self.hub.data(to, body))

    def spend(self, messages: int = 10) -> None:
        """Send as much as passes at once."""
        for _ in range(messages):
            assert self.say("nobody").error.code == "unreachable"

    def ended(self) -> tuple[int, str]:
        """How the hub closed the connection. Nothing was said before."""
        with pytest.raises(ConnectionClosed) as info:
            self.read()
        assert info.value.rcvd is not None
        return info.value.rcvd.code, info.value.rcvd.reason


def sender(envelope: wire.Envelope) -> str:
    return str(getattr(envelope, "from"))


# Who it is -----------------------------------------------------------------------------------------------------------


def test_d1_an_address_is_an_agents_id_proved_by_its_token() -> None:
    with Hub() as hub, hub.stranger() as agent:
        for name, token in (("alice", "wrong"), ("alice", "bob"), ("mallory", "yrollam"), ("alice", "")):
            answer = agent.hello(name, token)
            assert (answer.type, answer.error.code) == (ERROR, "unauthorized")
        answer = agent.hello("alice")
        assert (answer.type, answer.welcome.address) == (wire.MESSAGE_TYPE_WELCOME, "alice")


def test_addresses_that_no_agent_can_have() -> None:
    with Hub() as hub, hub.stranger() as agent:
        for name in ("", "a" * 129, "a\nb"):
            assert agent.hello(name).error.code == "invalid"


def test_nothing_but_hello_is_accepted_first() -> None:
    with Hub() as hub, hub.stranger() as agent, hub.agent("bob") as bob:
        for envelope in (
            hub.data("bob"),
            wire.Envelope(id="1", type=wire.MESSAGE_TYPE_HELLO),
            wire.Envelope(id="2", type=wire.MESSAGE_TYPE_DATA, hello=wire.Hello(address="alice", token="ecila")),
        ):
            answer = agent.ask(envelope)
            assert (answer.type, answer.error.code) == (ERROR, "invalid")
            assert answer.error.detail.startswith("expected HELLO with its payload")
        assert agent.ask(TOO_LARGE).error.code == "too_large"
        assert len(hub.store) == 0, "nobody is charged for it"
        assert agent.hello("alice").type == wire.MESSAGE_TYPE_WELCOME
        agent.say("bob", b"first")
        assert bob.read().data.body == b"first"


def test_b2_a_connection_that_does_not_identify_is_closed() -> None:
    with Hub() as hub, hub.stranger() as late, hub.stranger() as wrong, hub.agent("bob") as bob:
        hub.clock.advance(9.999)
        wrong.hello("alice", "wrong")
        with hub.stranger() as later:
            hub.clock.advance(0.001)
            assert late.ended() == (1008, "no HELLO that could be proved within 10 s")
            assert wrong.ended()[0] == 1008
            assert later.hello("alice").type == wire.MESSAGE_TYPE_WELCOME
            hub.clock.advance(100)
            assert later.say("bob", b"later").type == ACK
            assert bob.read().data.body == b"later"


def test_b2_failed_hellos_are_limited_by_address() -> None:
    with Hub() as hub, hub.stranger() as agent:
        for _ in range(60):
            assert agent.hello("alice", "wrong").error.code == "unauthorized"
        answer = agent.hello("alice", "wrong")
        assert (answer.type, answer.rate_limited.retry_after_ms) == (LIMITED, 1000)
        assert "failed attempts" in answer.rate_limited.reason
        assert agent.hello("alice").type == wire.MESSAGE_TYPE_WELCOME, "who knows the token is let in all the same"


def test_d3_where_no_wait_helps_a_day_is_said() -> None:
    with Hub(failed=Limiter(BLOCKED).acheck) as hub, hub.stranger() as agent:
        assert agent.hello("alice", "wrong").rate_limited.retry_after_ms == 86_400_000


def test_who_can_tell_whose_a_token_is_may_be_away() -> None:
    async def away(*_: str) -> bool:
        raise StoreAway("the server is away")

    with Hub(verify=away) as hub, hub.stranger() as agent:
        answer = agent.hello("alice")
        assert (answer.type, answer.error.code) == (ERROR, "unavailable")
        assert hub.relay.connections == 1


# How much ------------------------------------------------------------------------------------------------------------


def test_d1_a_burst_of_ten_then_one_a_second() -> None:
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        assert len(hub.store) == 0, "a bucket is made on the first message"
        alice.spend(10)
        for _ in range(3):
            assert alice.say("bob").type == LIMITED
            hub.clock.advance(1)
            assert alice.say("nobody").type == ERROR
        assert bob.say("bob").type == ACK, "each address has its own"


def test_d1_connections_of_one_address_share_its_bucket() -> None:
    with Hub() as hub, hub.agent("alice") as one, hub.agent("alice") as other:
        one.spend(6)
        other.spend(4)
        assert one.say("alice").type == other.say("alice").type == LIMITED


def test_d1_reconnecting_refills_nothing_and_nothing_stays_behind() -> None:
    with Hub() as hub:
        with hub.agent("alice") as alice:
            alice.spend(10)
        wait_for(lambda: hub.relay.connections == 0, "the connection to be gone")
        hub.clock.advance(3)
        with hub.agent("alice") as alice:
            alice.spend(3)
            assert alice.say("bob").rate_limited.retry_after_ms == 1000
        wait_for(lambda: hub.relay.connections == 0, "the connection to be gone")
        assert len(hub.store) == 1
        hub.clock.advance(10.1)
        other = Limiter("1000/day", store=hub.store)
        for _ in range(1000):  # the store tidies up while it is used
            other.check("passer-by")
        assert len(hub.store) == 1, "of the passer-by"
        with hub.agent("alice") as alice:
            alice.spend(10)


def test_d2_the_check_comes_before_size_and_content() -> None:
    with Hub() as hub, hub.agent("alice") as alice:
        for frame, code in ((TOO_LARGE, "too_large"), (GARBAGE, "invalid"), ("text", "invalid")):
            for _ in range(3):
                assert alice.ask(frame).error.code == code
        alice.spend(1)
        for denied in (TOO_LARGE, GARBAGE, "text", wire.Envelope(), wire.Envelope(id="1" * 129).SerializeToString()):
            answer = alice.ask(denied)
            assert (answer.type, answer.in_reply_to) == (LIMITED, "")
        assert alice.ask(hub.data("bob", b"x" * 65_000)).type == LIMITED, "and it names the id"


def test_d2_an_envelope_may_have_64_kib() -> None:
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        envelope = hub.data("bob")
        envelope.data.body = b"x" * (65_536 - len(hub.data("bob", b"x" * 65_000).SerializeToString()) + 65_000)
        assert len(envelope.SerializeToString()) == 65_536
        assert alice.ask(envelope).type == ACK
        assert bob.read().data == envelope.data
        answer = alice.ask(envelope.SerializeToString() + b"\0")
        assert answer.error.code == "too_large"
        assert answer.error.detail == "expected at most 65536 bytes, got 65537"


def test_d3_a_denial_says_the_true_wait_rounded_up() -> None:
    with Hub() as hub, hub.agent("alice") as alice:
        alice.spend(10)
        for seconds, wait in ((0, 1000), (0.25, 750), (0.1999, 551), (0.55, 1), (0.000099, 1)):
            hub.clock.advance(seconds)
            answer = alice.say("bob")
            assert (answer.type, answer.WhichOneof("payload")) == (15, "rate_limited")
            assert answer.rate_limited.retry_after_ms == wait
        hub.clock.advance(0.000001)
        assert alice.say("nobody").type == ERROR
        answer = alice.say("bob")
        assert answer.rate_limited.reason == "an address may send 1/second burst 10; send it again in 1000 ms"
        assert (answer.id, sender(answer), answer.to) == ("", "", "")


@pytest.mark.parametrize(
    ("rate", "burst", "limit"),
    [("1.0", "10", "1/second burst 10"), ("0.1", "3", "0.1/second burst 3"), (" 100 ", " 7 ", "100/second burst 7")],
)
def test_d4_rate_and_burst_are_settings(rate: str, burst: str, limit: str) -> None:
    limiter = relay_limiter(rate, burst, MemoryStore())
    assert limiter is not None
    assert str(limiter.limit) == limit


def test_d4_off_lets_everything_pass() -> None:
    with Hub(rate="off", burst="") as hub, hub.agent("alice") as alice:
        alice.spend(200)
        assert len(hub.store) == 0
    assert relay_limiter(" OFF ", "10", hub.store) is None


RATE_TEXT = "HEADGATE_RELAY_RATE_LIMIT: expected messages per second, a number above 0 such as 1.0, or off, got "
BURST_TEXT = "HEADGATE_RELAY_RATE_BURST: expected a whole number of messages above 0 such as 10, got "
BAD = (
    [(bad, "10", RATE_TEXT) for bad in ("", "0", "0.0", "-1", "nan", "inf", "1e3", "none", "1/second", "\u0661")],
    [("1", bad, BURST_TEXT) for bad in ("", "0", "1.5", "-1", "off", "\u0661")],
)


@pytest.mark.parametrize(("rate", "burst", "text"), [*BAD[0], *BAD[1]])
def test_d4_bad_settings(rate: str, burst: str, text: str) -> None:
    with pytest.raises(HeadgateError) as info:
        relay_limiter(rate, burst, MemoryStore())
    assert str(info.value) == f"{text}{rate if text is RATE_TEXT else burst!r}"


def test_d4_settings_that_do_not_fit_together() -> None:
    with pytest.raises(HeadgateError) as info:
        relay_limiter("0.000000000000000001", "999999999999999999", MemoryStore())
    given = "HEADGATE_RELAY_RATE_LIMIT 0.000000000000000001 with HEADGATE_RELAY_RATE_BURST 999999999999999999: "
    assert str(info.value).startswith(given)


# To whom -------------------------------------------------------------------------------------------------------------


def test_d3_accepted_ones_are_acknowledged_by_id_and_say_who_sent_them() -> None:
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        question = hub.data("bob", b"\0\xff", **{"from": "carol"})
        answer = alice.ask(question)
        assert (answer.type, answer.WhichOneof("payload"), answer.in_reply_to) == (ACK, "ack", question.id)
        got = bob.read()
        assert (sender(got), got.to, got.id) == ("alice", "bob", question.id)
        assert got.data == question.data
        bob.ask(hub.data("alice", b"yes", in_reply_to=got.id))
        got = alice.read()
        assert (sender(got), got.data.body, got.in_reply_to) == ("bob", b"yes", question.id)


def test_every_connection_of_an_address_gets_it() -> None:
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as one, hub.agent("carol") as carol:
        with hub.agent("bob") as other:
            alice.say("bob", b"both")
            assert one.read().data.body == other.read().data.body == b"both"
        wait_for(lambda: hub.relay.connections == 3, "the connection to be gone")
        assert alice.say("bob", b"one").type == ACK
        assert one.read().data.body == b"one"
        carol.say("carol", b"own")
        assert carol.read().data.body == b"own", "and nothing came before"


def test_what_this_hub_does_not_know_is_not_passed_on() -> None:
    """Else an agent could say what a later schema lets only the hub say."""
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        known = hub.data("bob").SerializeToString()
        assert alice.ask(known + b"\xfa\x3e\x03hub").type == ACK
        frame = bob.socket.recv(timeout=PATIENCE)
        assert isinstance(frame, bytes)
        assert b"hub" not in frame


def test_an_address_without_a_connection() -> None:
    with Hub() as hub, hub.agent("alice") as alice:
        with hub.agent("bob"):
            pass
        wait_for(lambda: hub.relay.connections == 1, "the connection to be gone")
        answer = alice.say("bob")
        assert (answer.type, answer.error.code) == (ERROR, "unreachable")


@contextmanager
def overflowing(hub: Hub, alice: Agent) -> Iterator[tuple[Agent, list[str]]]:
    """A connection of bob's that doesn't read, when no more waits for it than may; and what was acknowledged."""
    with hub.agent("bob", max_queue=1) as bob:
        taken: list[str] = []
        while (answer := alice.say("bob", b"x" * 65_000)).type == ACK:
            taken.append(answer.in_reply_to)
            assert len(taken) < 1000
        assert answer.error.code == "busy"
        yield bob, taken


def test_a_reader_that_is_too_slow_makes_nobody_wait() -> None:
    with Hub(rate="off", room=3) as hub, hub.agent("alice") as alice, overflowing(hub, alice) as (bob, taken):
        assert alice.say("bob").error.code == "busy"
        assert alice.say("alice").type == ACK
        alice.read()
        with hub.agent("bob") as quick:
            assert alice.say("bob", b"quick").type == ACK, "one of its connections took it"
            assert quick.read().data.body == b"quick"
        assert [bob.read().id for _ in taken] == taken, "what was acknowledged is not lost"


# What is wrong with it -----------------------------------------------------------------------------------------------


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
    (
        wire.Envelope(id="1", type=wire.MESSAGE_TYPE_DATA, data=wire.Data()),
        "expected `to`, the address that it goes to",
    ),
]


def test_invalid_envelopes() -> None:
    with Hub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        for envelope, detail in INVALID:
            answer = alice.ask(envelope)
            assert (answer.type, answer.error.code, answer.error.detail) == (ERROR, "invalid", detail)
            hub.clock.advance(60)
        alice.say("bob", b"next")
        got = bob.read()
        assert (sender(got), got.data.body) == ("alice", b"next"), "and nothing came before"


def test_b9_ten_invalid_envelopes_within_a_minute_close_the_connection() -> None:
    frames: list[Frame] = [GARBAGE, "text", TOO_LARGE, wire.Envelope(id="1")] * 3
    with Hub(burst="20") as hub, hub.agent("alice") as alice, hub.stranger() as stranger:
        for agent in (alice, stranger):
            for frame in frames[:10]:
                assert agent.ask(frame).type == ERROR
            assert agent.ended() == (1008, "10 invalid envelopes within a minute")
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")


def test_b9_ten_over_more_than_a_minute_do_not() -> None:
    with Hub(burst="30") as hub, hub.agent("alice") as one, hub.agent("alice") as other:
        for agent in (one, other):
            for _ in range(9):
                assert agent.ask(GARBAGE).type == ERROR
        hub.clock.advance(59.999999)
        assert one.ask(GARBAGE).type == ERROR
        assert one.ended()[0] == 1008
        hub.clock.advance(0.000001)
        for _ in range(9):
            assert other.ask(GARBAGE).type == ERROR
        assert other.say("alice").type == ACK


def test_b9_denials_never_count_and_never_close() -> None:
    with Hub() as hub, hub.agent("alice") as alice:
        for _ in range(8):
            assert alice.ask(GARBAGE).type == ERROR
        alice.spend(2)
        for _ in range(15):
            assert alice.ask(GARBAGE).type == LIMITED
        hub.clock.advance(3)
        assert alice.ask(GARBAGE).type == ERROR
        alice.spend(1)
        assert alice.ask(GARBAGE).type == ERROR
        assert alice.ended()[0] == 1008


def test_b11_a_run_of_denials_is_read_more_slowly() -> None:
    """A pause never ends early, so there is a time that it takes at least, on any machine."""
    with Hub() as hub, hub.agent("alice") as alice:
        alice.spend(10)
        for _ in range(9):
            assert alice.say("bob").type == LIMITED
        hub.flood.connections = DENIALS // 20 - 1  # who share what the hub spends on them, each 20 times a second
        begun = time.monotonic()
        for _ in range(6):
            assert alice.say("bob").type == LIMITED
        assert time.monotonic() - begun > 0.2
        hub.clock.advance(1)
        alice.spend(1)


# When it ends --------------------------------------------------------------------------------------------------------


def test_an_agent_whose_token_was_revoked_is_dropped() -> None:
    with Hub() as hub, hub.agent("alice") as one, hub.agent("alice") as other, hub.agent("bob") as bob:
        del hub.tokens["alice"]
        hub.server.call(hub.relay.drop, "alice")
        hub.server.call(hub.relay.drop, "nobody")
        for agent in (one, other):
            assert agent.ended() == (1008, "the token of this agent was revoked or replaced")
        assert bob.say("alice").error.code == "unreachable"
        wait_for(lambda: hub.relay.connections == 1, "the connections to be gone")


def test_a_token_that_is_revoked_while_it_is_looked_up_lets_nobody_in() -> None:
    answers = [True, False]

    async def verify(address: str, token: str) -> bool:
        answer = answers.pop(0)
        if answer:
            hub.relay.drop(address)
        return answer

    with Hub(verify=verify) as hub, hub.stranger() as agent:
        assert agent.hello("alice").error.code == "unauthorized"
        assert answers == []


def test_a_message_that_is_under_way_when_its_agent_is_dropped_goes_nowhere() -> None:
    class Dropping(Limiter):
        async def acheck(self, key: str, *args: Any, **options: Any) -> Decision:
            if key == "alice":
                hub.relay.drop(key)
                await asyncio.sleep(0)
            return await super().acheck(key, *args, **options)

    with Hub(limiter=Dropping("1/second burst 10")) as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        alice.socket.send(hub.data("bob", b"too late").SerializeToString())
        assert alice.ended()[0] == 1008
        bob.socket.send(hub.data("bob", b"next").SerializeToString())
        assert {bob.read().data.body, bob.read().data.body} == {b"", b"next"}, "the acknowledgement, and this alone"


def test_nothing_is_kept_of_a_connection_that_is_gone() -> None:
    with Hub() as hub:
        for _ in range(3):
            with hub.agent("alice") as one, hub.agent("alice"), hub.stranger():
                one.spend(1)
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")
        hub.clock.advance(10)  # it keeps an alarm until it has passed
        wait_for(lambda: gc.collect() >= 0 and not hub.sockets, "the sockets to be forgotten")


def test_a_hub_that_stops_says_when_to_come_back() -> None:
    waits = count(3000, 500)
    with Hub() as hub, hub.agent("alice") as alice, hub.stranger() as stranger:
        hub.server.run(hub.relay.drain(lambda: next(waits)))
        told = {alice.ended(), stranger.ended()}
        assert told == {(1012, "restarting; retry in 3000 ms"), (1012, "restarting; retry in 3500 ms")}
        with hub.stranger() as late:
            assert late.ended() == (1012, "restarting; retry in 4000 ms")
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")


def test_a_hub_that_stops_sends_what_it_has_acknowledged() -> None:
    with Hub(rate="off", room=3) as hub, hub.agent("alice") as alice, overflowing(hub, alice) as (bob, taken):
        with ThreadPoolExecutor() as threads:
            drained = threads.submit(hub.server.run, hub.relay.drain(lambda: 1))
            assert alice.ended()[0] == 1012
            bob.socket.send(hub.data("bob", b"neither passed on nor acknowledged").SerializeToString())
            assert [bob.read().id for _ in taken] == taken
            drained.result()
        assert bob.ended()[0] == 1012


def test_a_hub_that_stops_waits_for_no_reader() -> None:
    with Hub(rate="off", room=3) as hub, hub.agent("alice") as alice, overflowing(hub, alice) as (bob, _):
        hub.server.run(hub.relay.drain(lambda: 1))
        assert alice.ended()[0] == 1012
        bob.socket.socket.close()


# Anything at all -----------------------------------------------------------------------------------------------------


def mutated(chance: random.Random, frame: bytes) -> bytes:
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


def fuzz(chance: random.Random, hub: Hub) -> bytes | str:
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
    return frame if kind == 6 else mutated(chance, frame)


def test_no_envelope_does_any_harm(caplog: pytest.LogCaptureFixture) -> None:
    """Each is answered, none is passed on in another's name, and whoever sends too many bad ones is cut off."""
    chance = random.Random(5)  # the same ones each time
    answers = {ACK: 0, ERROR: 0, wire.MESSAGE_TYPE_DATA: 0}
    sent = 0
    with caplog.at_level(logging.WARNING), Hub(rate="off") as hub, hub.agent("bob") as bob:
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
