"""The relay over real WebSockets: authentication, limits, delivery, and shutdown."""

import asyncio
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from headgate import Decision, Gate, HeadgateError, Limiter, MemoryStore, Policy
from headgate.errors import StoreAway
from headgate.hub.agents.authentication import Authentication
from headgate.hub.sockets.relay import relay_limiter
from headgate.proto import envelope_pb2 as wire
from tests.support.relay import ACK, ERROR, GARBAGE, LIMITED, TOO_LARGE, RelayAgent, RelayHub, sender
from tests.support.valkey import PATIENCE, wait_for

# Who it is -----------------------------------------------------------------------------------------------------------


def test_invalid_addresses_are_refused() -> None:
    with RelayHub() as hub, hub.stranger() as agent:
        for name in ("", "a" * 129, "a\nb"):
            assert agent.hello(name).error.code == "invalid"


def test_nothing_but_hello_is_accepted_first() -> None:
    with RelayHub() as hub, hub.stranger() as agent, hub.agent("bob") as bob:
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
    with RelayHub() as hub, hub.stranger() as late, hub.stranger() as wrong, hub.agent("bob") as bob:
        hub.clock.advance(9.999)
        wrong.hello("alice", "wrong")
        with hub.stranger() as later:
            hub.clock.advance(0.001)
            assert late.read_close() == (1008, "no HELLO that could be proved within 10 s")
            assert wrong.read_close()[0] == 1008
            assert later.hello("alice").type == wire.MESSAGE_TYPE_WELCOME
            hub.clock.advance(100)
            assert later.say("bob", b"later").type == ACK
            assert bob.read().data.body == b"later"


def test_b2_failed_hellos_are_limited_by_address() -> None:
    with RelayHub() as hub, hub.stranger() as agent:
        for _ in range(60):
            assert agent.hello("alice", "wrong").error.code == "unauthorized"
        answer = agent.hello("alice", "wrong")
        assert (answer.type, answer.rate_limited.retry_after_ms) == (LIMITED, 1000)
        assert "failed attempts" in answer.rate_limited.reason
        assert agent.hello("alice").type == LIMITED, "no token is looked at any more"
        hub.clock.advance(1)  # with 10 it would be closed, as one that has not identified
        assert agent.hello("alice").type == wire.MESSAGE_TYPE_WELCOME


def test_d3_a_blocked_address_is_told_to_wait_a_day() -> None:
    blocked = Authentication(Gate(Policy(addresses={"authentication": "blocked"})))
    with RelayHub(authentication=blocked) as hub, hub.stranger() as agent:
        assert agent.hello("alice", "wrong").rate_limited.retry_after_ms == 86_400_000


def test_hello_during_an_outage_is_answered_with_unavailable() -> None:
    class AwayHub(RelayHub):
        async def verify(self, address: str, token: str) -> bool:
            raise StoreAway("the server is away")

    with AwayHub() as hub, hub.stranger() as agent:
        answer = agent.hello("alice")
        assert (answer.type, answer.error.code) == (ERROR, "unavailable")
        assert hub.relay.connections == 1


def test_an_address_has_so_many_connections() -> None:
    with RelayHub(most_connections=2) as hub, hub.agent("alice"), hub.agent("bob"):
        with hub.agent("alice"), hub.stranger() as third:
            answer = third.hello("alice")
            assert (answer.type, answer.error.code) == (ERROR, "too_many_connections")
            assert answer.error.detail == "'alice' has 2 connections, and may have no more"
            assert third.read_close() == (1013, "too many connections of this address")
        wait_for(lambda: hub.relay.connections == 2, "room")
        with hub.agent("alice"):
            pass


# How much ------------------------------------------------------------------------------------------------------------


def test_d1_a_burst_of_ten_then_one_a_second() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        assert len(hub.store) == 0, "a bucket is made on the first message"
        alice.spend(10)
        for _ in range(3):
            assert alice.say("bob").type == LIMITED
            hub.clock.advance(1)
            assert alice.say("nobody").type == ERROR
        assert bob.say("bob").type == ACK, "each address has its own"


def test_d1_connections_of_one_address_share_its_bucket() -> None:
    with RelayHub() as hub, hub.agent("alice") as one, hub.agent("alice") as other:
        one.spend(6)
        other.spend(4)
        assert one.say("alice").type == other.say("alice").type == LIMITED


def test_d1_reconnecting_refills_nothing_and_full_buckets_are_removed() -> None:
    with RelayHub() as hub:
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
    with RelayHub() as hub, hub.agent("alice") as alice:
        for frame, code in ((TOO_LARGE, "too_large"), (GARBAGE, "invalid"), ("text", "invalid")):
            for _ in range(3):
                assert alice.ask(frame).error.code == code
        alice.spend(1)
        for denied in (TOO_LARGE, GARBAGE, "text", wire.Envelope(), wire.Envelope(id="1" * 129).SerializeToString()):
            answer = alice.ask(denied)
            assert (answer.type, answer.in_reply_to) == (LIMITED, "")
        assert alice.ask(hub.data("bob", b"x" * 65_000)).type == LIMITED, "and it names the id"


def test_d2_an_envelope_has_at_most_64_kib() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        envelope = hub.data("bob")
        envelope.data.body = b"x" * (65_536 - len(hub.data("bob", b"x" * 65_000).SerializeToString()) + 65_000)
        assert len(envelope.SerializeToString()) == 65_536
        assert alice.ask(envelope).type == ACK
        assert bob.read().data == envelope.data
        answer = alice.ask(envelope.SerializeToString() + b"\0")
        assert answer.error.code == "too_large"
        assert answer.error.detail == "expected at most 65536 bytes, got 65537"


def test_d3_a_denial_gives_the_exact_wait_rounded_up() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice:
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


def test_d4_off_lets_everything_pass() -> None:
    with RelayHub(rate="off", burst="") as hub, hub.agent("alice") as alice:
        alice.spend(200)
        assert len(hub.store) == 0
    assert relay_limiter(" OFF ", "10", hub.store) is None


RATE_TEXT = "HEADGATE_RELAY_RATE_LIMIT: expected messages per second, a number above 0 such as 1.0, or off, got "
BURST_TEXT = "HEADGATE_RELAY_RATE_BURST: expected a whole number of messages above 0 such as 10, got "
BAD = (
    [(bad, "10", RATE_TEXT) for bad in ("", "0", "0.0", "-1", "nan", "inf", "1e400", "none", "1/second", "\u0661")],
    [("1", bad, BURST_TEXT) for bad in ("", "0", "1.5", "-1", "off", "\u0661")],
)


@pytest.mark.parametrize(("rate", "burst", "text"), [*BAD[0], *BAD[1]])
def test_d4_invalid_settings_are_refused(rate: str, burst: str, text: str) -> None:
    with pytest.raises(HeadgateError) as info:
        relay_limiter(rate, burst, MemoryStore())
    assert str(info.value) == f"{text}{rate if text is RATE_TEXT else burst!r}"


def test_d4_settings_out_of_range_together_are_refused() -> None:
    with pytest.raises(HeadgateError) as info:
        relay_limiter("0.000000000000000001", "999999999999999999", MemoryStore())
    given = "HEADGATE_RELAY_RATE_LIMIT 0.000000000000000001 with HEADGATE_RELAY_RATE_BURST 999999999999999999: "
    assert str(info.value).startswith(given)


# To whom -------------------------------------------------------------------------------------------------------------


def test_d3_accepted_envelopes_are_acknowledged_by_id_and_name_their_sender() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        question = hub.data("bob", b"\0\xff", **{"from": "carol"})
        answer = alice.ask(question)
        assert (answer.type, answer.WhichOneof("payload"), answer.in_reply_to) == (ACK, "ack", question.id)
        got = bob.read()
        assert (sender(got), got.to, got.id) == ("alice", "bob", question.id)
        assert got.data == question.data
        bob.ask(hub.data("alice", b"yes", in_reply_to=got.id))
        got = alice.read()
        assert (sender(got), got.data.body, got.in_reply_to) == ("bob", b"yes", question.id)


def test_every_connection_of_an_address_gets_an_envelope() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as one, hub.agent("carol") as carol:
        with hub.agent("bob") as other:
            alice.say("bob", b"both")
            assert one.read().data.body == other.read().data.body == b"both"
        wait_for(lambda: hub.relay.connections == 3, "the connection to be gone")
        assert alice.say("bob", b"one").type == ACK
        assert one.read().data.body == b"one"
        carol.say("carol", b"own")
        assert carol.read().data.body == b"own", "and nothing came before"


def test_unknown_fields_are_not_passed_on() -> None:
    """Else an agent could say what a later schema lets only the hub say."""
    with RelayHub() as hub, hub.agent("alice") as alice, hub.agent("bob") as bob:
        known = hub.data("bob").SerializeToString()
        assert alice.ask(known + b"\xfa\x3e\x03hub").type == ACK
        frame = bob.socket.recv(timeout=PATIENCE)
        assert isinstance(frame, bytes)
        assert b"hub" not in frame


def test_an_address_without_a_connection_is_unreachable() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice:
        with hub.agent("bob"):
            pass
        wait_for(lambda: hub.relay.connections == 1, "the connection to be gone")
        answer = alice.say("bob")
        assert (answer.type, answer.error.code) == (ERROR, "unreachable")


@contextmanager
def overflowing_connection(hub: RelayHub, alice: RelayAgent) -> Iterator[tuple[RelayAgent, list[str]]]:
    """A connection of bob's that doesn't read, when no more waits for it than may; and what was acknowledged."""
    with hub.agent("bob", max_queue=1) as bob:
        taken: list[str] = []
        while (answer := alice.say("bob", b"x" * 65_000)).type == ACK:
            taken.append(answer.in_reply_to)
            if len(taken) == 2:  # more than that it doesn't read by itself
                wait_for(lambda: bob.socket.recv_messages.paused, "bob to have enough")
            assert len(taken) < 1000
        assert answer.error.code == "busy"
        yield bob, taken


def test_a_slow_reader_delays_nobody() -> None:
    with (
        RelayHub(rate="off", room=3) as hub,
        hub.agent("alice") as alice,
        overflowing_connection(hub, alice) as (bob, taken),
    ):
        assert alice.say("bob").error.code == "busy"
        assert alice.say("alice").type == ACK
        alice.read()
        with hub.agent("bob") as quick:
            assert alice.say("bob", b"quick").type == ACK, "one of its connections took it"
            assert quick.read().data.body == b"quick"
        assert [bob.read().id for _ in taken] == taken, "what was acknowledged is not lost"


# When it ends --------------------------------------------------------------------------------------------------------


def test_an_agent_with_a_revoked_token_is_dropped() -> None:
    with RelayHub() as hub, hub.agent("alice") as one, hub.agent("alice") as other, hub.agent("bob") as bob:
        hub.server.call(hub.revoke, "alice")
        hub.server.call(hub.revoke, "nobody")
        for agent in (one, other):
            assert agent.read_close() == (1008, "the token of this agent was revoked or replaced")
        assert bob.say("alice").error.code == "unreachable"
        wait_for(lambda: hub.relay.connections == 1, "the connections to be gone")


def test_a_token_revoked_during_hello_lets_nobody_in() -> None:
    class RevokingHub(RelayHub):
        async def verify(self, address: str, token: str) -> bool:
            valid = await super().verify(address, token)
            self.revoke(address)
            return valid

    with RevokingHub() as hub, hub.stranger() as agent:
        assert agent.hello("alice").error.code == "unauthorized"


def test_a_token_revoked_after_its_lookup_lets_nobody_in() -> None:
    """As while an address with many wrong tokens is refunded for a valid one."""

    class RevokingAuthentication(Authentication):
        async def attempt(self, address: str, token: str, look_up: Any) -> Any:
            found = await super().attempt(address, token, look_up)
            if "alice" in hub.tokens:
                hub.revoke("alice")
            return found

    with RelayHub(authentication=RevokingAuthentication(Gate())) as hub, hub.stranger() as agent:
        assert agent.hello("alice").error.code == "unauthorized"
        assert hub.tokens.keys() == {"bob", "carol"}


def test_an_envelope_in_flight_when_its_sender_is_dropped_is_discarded() -> None:
    class DroppingLimiter(Limiter):
        async def acheck(self, key: str, *args: Any, **options: Any) -> Decision:
            if key == "alice":
                hub.relay.drop(key)
                await asyncio.sleep(0)
            return await super().acheck(key, *args, **options)

    with (
        RelayHub(limiter=DroppingLimiter("1/second burst 10")) as hub,
        hub.agent("alice") as alice,
        hub.agent("bob") as bob,
    ):
        alice.socket.send(hub.data("bob", b"too late").SerializeToString())
        assert alice.read_close()[0] == 1008
        bob.socket.send(hub.data("bob", b"next").SerializeToString())
        assert {bob.read().data.body, bob.read().data.body} == {b"", b"next"}, "the acknowledgement, and this alone"


def test_a_closed_connection_leaves_nothing_behind() -> None:
    with RelayHub() as hub:
        for _ in range(3):
            with hub.agent("alice") as one, hub.agent("alice"), hub.stranger():
                one.spend(1)
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")
        hub.clock.advance(10)  # it keeps an alarm until it has passed
        wait_for(lambda: gc.collect() >= 0 and not hub.sockets, "the sockets to be forgotten")


def test_a_stopping_hub_says_when_to_reconnect() -> None:
    waits = count(3000, 500)
    with RelayHub() as hub, hub.agent("alice") as alice, hub.stranger() as stranger:
        hub.server.run(hub.relay.drain(lambda: next(waits)))
        told = {alice.read_close(), stranger.read_close()}
        assert told == {(1012, "restarting; retry in 3000 ms"), (1012, "restarting; retry in 3500 ms")}
        with hub.stranger() as late:
            assert late.read_close() == (1012, "restarting; retry in 4000 ms")
        wait_for(lambda: hub.relay.connections == 0, "the connections to be gone")


def test_a_stopping_hub_sends_acknowledged_envelopes(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("_FLUSH", "_DRAIN"):
        monkeypatch.setattr(f"headgate.hub.sockets.relay.{patience}", PATIENCE)
    with (
        RelayHub(rate="off", room=3) as hub,
        hub.agent("alice") as alice,
        overflowing_connection(hub, alice) as (bob, taken),
    ):
        with ThreadPoolExecutor() as threads:
            drained = threads.submit(hub.server.run, hub.relay.drain(lambda: 1))
            assert alice.read_close()[0] == 1012
            bob.socket.send(hub.data("bob", b"neither passed on nor acknowledged").SerializeToString())
            assert [bob.read().id for _ in taken] == taken
            drained.result()
        assert bob.read_close()[0] == 1012


def test_a_stopping_hub_does_not_wait_for_slow_readers() -> None:
    with (
        RelayHub(rate="off", room=3) as hub,
        hub.agent("alice") as alice,
        overflowing_connection(hub, alice) as (bob, _),
    ):
        hub.server.run(hub.relay.drain(lambda: 1))
        assert alice.read_close()[0] == 1012
        bob.socket.socket.close()


def test_passed_and_denied_envelopes_are_counted() -> None:
    with RelayHub() as hub, hub.agent("alice") as alice:
        alice.spend()
        assert alice.say("bob").type == alice.say("bob").type == LIMITED
        assert (hub.relay.passed, hub.relay.denied) == (10, 2)
    with RelayHub(rate="off") as hub, hub.agent("alice") as alice:
        alice.spend(12)
        assert (hub.relay.passed, hub.relay.denied) == (12, 0)
