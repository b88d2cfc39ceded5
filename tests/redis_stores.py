"""What tests of the store in Redis share: how long they wait, and what they find in a server."""

import struct
from typing import Any

from headgate import Limit, Limiter, MemoryStore
from headgate.stores.redis import RedisStore

TIMEOUT = 0.25
"""The store's own timeout."""
LONGEST = 2 * TIMEOUT + 1.0
"""Seconds that one check may take: once for the call before one's own, once for that, and the machine is busy."""
BACK = 1.5
"""Seconds from the end of a fault until nothing is degraded any more."""
POLICIES = ["open", "closed", "local"]


def doubles(*numbers: float) -> bytes:
    """Numbers as they are stored."""
    return struct.pack(f"<{len(numbers)}d", *numbers)


def time_of(raw: Any) -> int:
    """The server's time in microseconds."""
    seconds, rest = raw.time()
    return int(seconds) * 1_000_000 + int(rest)


def keys_of(raw: Any) -> list[bytes]:
    return sorted(raw.scan_iter(count=1000))


def both(still: RedisStore, limit: Limit) -> list[Limiter]:
    """A limiter in the server, and one in memory on the same clock."""
    return [Limiter(limit, store=store) for store in (still, MemoryStore(clock=still.clock))]
