"""Client addresses, and the proxies that are trusted to name them."""

import asyncio
from typing import Any

import pytest

from headgate import Gate, InvalidInput, Limiter, ManualClock, MemoryStore, Policy
from headgate.edges.asgi import Message, RateLimitMiddleware, Receive, Scope, Send
from headgate.edges.requests import AsgiRequest, Proxies, WsgiRequest

pytestmark = pytest.mark.once

OURS = ["10.0.0.0/8", "fd00::/8"]


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        # No proxy of ours has called: what it says is its own invention.
        ("192.0.2.1", "", "192.0.2.1"),
        ("192.0.2.1", "6.6.6.6", "192.0.2.1"),
        ("192.0.2.1", "10.0.0.1", "192.0.2.1"),
        ("192.0.2.1", "6.6.6.6, 10.0.0.1", "192.0.2.1"),
        ("2001:db8::1", "6.6.6.6", "2001:db8::1"),
        # One of ours has: it added whom it was called from, and what stands before that may be anybody's invention.
        ("10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "6.6.6.6, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "10.0.0.2, 192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "6.6.6.6,192.0.2.1,10.0.0.3 ,\t10.0.0.2", "192.0.2.1"),
        ("10.0.0.1", "2001:db8::1, fd00::2", "2001:db8::1"),
        ("fd00::1", "192.0.2.1", "192.0.2.1"),
        ("::ffff:10.0.0.1", "192.0.2.1", "192.0.2.1"),
        ("10.0.0.1", "192.0.2.1, ::ffff:10.0.0.2", "192.0.2.1"),
        # All of ours: the one that is farthest away.
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "", "10.0.0.1"),
        # With ports, and in brackets.
        ("10.0.0.1", "192.0.2.1:1234", "192.0.2.1"),
        ("10.0.0.1", "[2001:db8::1]:1234", "2001:db8::1"),
        ("10.0.0.1", "[2001:db8::1]", "2001:db8::1"),
        ("10.0.0.1", "2001:DB8:0::1", "2001:db8::1"),
        # Garbage: as far as it makes sense.
        ("10.0.0.1", "garbage", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.1, garbage, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "192.0.2.1, , 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "192.0.2.1, unknown", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.1 6.6.6.6", "10.0.0.1"),
        ("10.0.0.1", "192.0.2.256", "10.0.0.1"),
        ("10.0.0.1", "[2001:db8::1", "2001:db8::1"),
        ("10.0.0.1", "[]", "10.0.0.1"),
        ("10.0.0.1", "\x00, \xff", "10.0.0.1"),
        ("10.0.0.1", ",,,", "10.0.0.1"),
        ("not an address", "192.0.2.1", "not an address"),
        # A peer at a Unix socket has no address, and isn't believed unless that was said.
        ("", "", "unknown"),
        ("", "192.0.2.1", "unknown"),
    ],
)
def test_the_first_from_the_end_that_is_no_proxy_is_the_client(peer: str, forwarded: str, client: str) -> None:
    assert Proxies(OURS).client(peer, forwarded) == client


@pytest.mark.parametrize(
    ("forwarded", "client"), [("192.0.2.1", "192.0.2.1"), ("6.6.6.6, 192.0.2.1", "192.0.2.1"), ("", "unknown")]
)
def test_a_proxy_at_a_unix_socket_can_be_named(forwarded: str, client: str) -> None:
    assert Proxies("unix").client("", forwarded) == client
    assert Proxies(["unix"]).client("10.0.0.1", forwarded) == "10.0.0.1"


def test_without_a_word_on_proxies_none_is_believed() -> None:
    assert not Proxies()
    assert Proxies().client("10.0.0.1", "192.0.2.1") == "10.0.0.1"


@pytest.mark.parametrize(
    "given", ["proxy.example", "10.0.0.0/33", "10.0.0.1/8", "*", "", 10, b"\x0a\x00\x00\x01", None]
)
def test_invalid_proxies_are_refused(given: Any) -> None:
    with pytest.raises(
        InvalidInput, match=r"proxies: expected addresses or networks such as '10.0.0.0/8', or 'unix', got"
    ):
        Proxies([given])


def test_repeated_headers_are_joined() -> None:
    headers = [(b"x-forwarded-for", b"6.6.6.6"), (b"host", b"a"), (b"x-forwarded-for", b"192.0.2.1, 10.0.0.2")]
    scope = {"headers": headers, "client": ("10.0.0.1", 80)}
    assert AsgiRequest(scope, Proxies(OURS)).address == "192.0.2.1"
    assert AsgiRequest({**scope, "client": None}, Proxies("unix")).address == "10.0.0.2"
    assert AsgiRequest({**scope, "client": None}, Proxies()).address == "unknown"
    environ = {"HTTP_X_FORWARDED_FOR": "6.6.6.6,192.0.2.1, 10.0.0.2", "REMOTE_ADDR": "10.0.0.1"}
    assert WsgiRequest(environ, Proxies(OURS)).address == "192.0.2.1"
    assert WsgiRequest({**environ, "REMOTE_ADDR": ""}, Proxies(["unix", *OURS])).address == "192.0.2.1"


# Behind a server -----------------------------------------------------------------------------------------------------


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200})
    await send({"type": "http.response.body", "body": b"hello"})


def which_pass(app: RateLimitMiddleware, *clients: str | None, forwarded: str = "") -> list[bool]:
    """Whether requests from some addresses pass, one after the other."""

    async def main() -> list[bool]:
        statuses: list[int] = []

        async def send(message: Message) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        async def receive() -> Message:
            return {"type": "http.request"}

        for client in clients:
            headers = [(b"x-forwarded-for", forwarded.encode())] if forwarded else []
            peer = None if client is None else (client, 1234)
            await app({"type": "http", "method": "GET", "path": "/", "headers": headers, "client": peer}, receive, send)
        return [status == 200 for status in statuses]

    return asyncio.run(main())


def by_limiter(**options: Any) -> RateLimitMiddleware:
    return RateLimitMiddleware(hello, Limiter("2/minute", store=MemoryStore(clock=ManualClock())), **options)


def by_named_limiter(**options: Any) -> RateLimitMiddleware:
    return by_limiter(key=lambda request: None, **options)


def by_gate(**options: Any) -> RateLimitMiddleware:
    policy = Policy(addresses={"limit": "2/minute", "exempt": ["2001:db8:7::9"]})
    return RateLimitMiddleware(hello, gate=Gate(policy, store=MemoryStore(clock=ManualClock())), **options)


@pytest.mark.parametrize("make", [by_limiter, by_named_limiter, by_gate])
def test_b3_each_ipv4_address_and_each_ipv6_64_is_counted(make: Any) -> None:
    app = make()
    assert which_pass(app, *["192.0.2.1"] * 3, "192.0.2.2") == [True, True, False, True]
    assert which_pass(app, "2001:db8::1", "2001:db8::ffff:1", "2001:db8::2") == [True, True, False]
    assert which_pass(app, "2001:db8:0:1::1", "2001:db8:1::1") == [True, True]
    assert which_pass(app, "::ffff:192.0.2.1", "::ffff:192.0.2.2", "::ffff:192.0.2.3") == [False, True, True]
    assert which_pass(app, None, "", None) == [True, True, False]


@pytest.mark.parametrize(("make", "passes"), [(by_limiter, True), (by_named_limiter, True), (by_gate, False)])
def test_a_non_address_is_a_name_to_a_limiter_and_unknown_to_a_gate(make: Any, passes: bool) -> None:
    app = make()
    assert which_pass(app, "there", "there", "there") == [True, True, False]
    assert which_pass(app, "elsewhere") == [passes]


def test_b3_an_exempt_ipv6_address_does_not_exempt_its_neighbours() -> None:
    assert which_pass(by_gate(), *["2001:db8:7::9"] * 5, *["2001:db8:7::8"] * 3) == [True] * 7 + [False]


@pytest.mark.parametrize("make", [by_limiter, by_gate])
def test_a_proxy_at_a_unix_socket_speaks_for_its_clients(make: Any) -> None:
    assert which_pass(make(proxies=["unix"]), None, None, None, forwarded="192.0.2.1") == [True, True, False]
    app = make(proxies=["unix"])
    assert (
        which_pass(app, None, None, forwarded="192.0.2.1") + which_pass(app, None, forwarded="192.0.2.2") == [True] * 3
    )
