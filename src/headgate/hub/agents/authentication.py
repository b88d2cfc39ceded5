"""Wrong tokens, limited by network address."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from headgate.errors import StoreAway
from headgate.gate import Gate
from headgate.gate.lookup import counted_as
from headgate.hub.agents.tokens import digest_of
from headgate.limits.decision import Decision

T = TypeVar("T")

MAX_SUSPECTS: Final = 10_000
"""Addresses that are remembered after too many wrong tokens; then the oldest is forgotten."""
MAX_KNOWN: Final = 20_000
"""Valid tokens that are remembered: those that were used last."""
MAX_ADDRESSES: Final = 8
"""Addresses that are remembered of each: those that it was used from last, so that nobody's can displace others.

A token takes about 300 bytes with one address and 800 with eight: 16 MB for all.
"""
_PURPOSE: Final = "authentication"


class Authentication:
    """Looks tokens up, and limits how many wrong ones an address may send.

    A wrong token is charged to its address. Once an address has used up its allowance, it pays before a token is looked
    at, and gets back what a valid token has cost. Until then a valid token costs nothing, so that hundreds of agents
    can authenticate from one address at once. A token that was valid before from the same address is no guess: whoever
    uses it neither pays nor waits, so that a flood of wrong tokens locks out nobody who was there before it.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate: Final = gate
        self._suspects: Final[OrderedDict[str, None]] = OrderedDict()
        self._known: Final[OrderedDict[bytes, list[str]]] = OrderedDict()  # addresses by the digests of valid tokens

    async def attempt(self, address: str, token: str, look_up: Callable[[], Awaitable[T | None]]) -> T | Decision:
        """The owner that `look_up` finds for a token; otherwise the decision on the address.

        While that is a denial, nothing is looked up.
        """
        suspect = counted_as(address)
        digest = digest_of(token)
        known, paid = suspect in self._known.get(digest, ()), None
        if suspect in self._suspects and not known:
            paid = await self._gate.acheck_address(address, _PURPOSE)
            if not paid:
                return paid
        try:
            found = await look_up()
        except StoreAway:
            if paid is None and not known:
                denied = await self.charge(address)  # otherwise guesses would be free while the store is away
                if not denied:
                    return denied
            raise
        if found is None:
            self._forget(digest, suspect)
            return await self.charge(address) if paid is None else paid
        self._remember(digest, suspect)
        if paid is not None:
            refunded = await self._gate.arefund_address(address, 1, _PURPOSE)
            if refunded.remaining > 1:
                self._suspects.pop(suspect, None)
        return found

    async def attempt_socket(
        self, address: str, token: str, look_up: Callable[[], Awaitable[T | None]], changes: Callable[[], int]
    ) -> T | Decision:
        """`attempt` for a socket that is to be kept: again if rights have ended meanwhile, as `changes` counts it.

        Then the token may have been revoked after it was looked up, and before its socket could be dropped.
        """
        while True:
            before = changes()
            found = await self.attempt(address, token, look_up)
            if isinstance(found, Decision) or before == changes():
                return found

    def _remember(self, digest: bytes, address: str) -> None:
        """Remember where a valid token was used last, in this order."""
        addresses = self._known.setdefault(digest, [])
        self._known.move_to_end(digest)
        if address in addresses:
            addresses.remove(address)
        addresses.append(address)
        del addresses[:-MAX_ADDRESSES]
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _forget(self, digest: bytes, address: str) -> None:
        addresses = self._known.get(digest, [])
        if address in addresses:
            addresses.remove(address)
            if not addresses:
                del self._known[digest]

    async def refund_connection(self, address: str) -> None:
        """An agent has identified over a WebSocket: give its address back what the connect has cost."""
        await self._gate.arefund_address(address, 1, "connection")

    async def charge(self, address: str) -> Decision:
        """Charge an address for a wrong token."""
        decision = await self._gate.acheck_address(address, _PURPOSE)
        if decision.remaining == 0:
            self._suspects[counted_as(address)] = None
            if len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
        return decision
