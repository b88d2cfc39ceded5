"""How somebody stands after a decision, written as the bytes of headers: the part of `wire` that every response needs.

It is compiled, and knows headers but no text: `wire` hands it what a limit says of itself.
"""

from functools import lru_cache
from typing import Final

from headgate._native import i64
from headgate.limits.decision import DENY, NEVER, Decision, Limit
from headgate.limits.token_bucket import TokenBucket

_SECOND: Final[i64] = 1_000_000


class Lines:
    """Writes how somebody stands under one limit, which may be made of several: then each has a name and a quota."""

    def __init__(self, policy: bytes, names: list[bytes], quotas: list[bytes], draft: bool, triple: bool) -> None:
        self._policy: Final = (b"ratelimit-policy", policy)
        self._left: Final = [name + b";r=" for name in names]
        self._limits: Final = [(b"x-ratelimit-limit", quota) for quota in quotas]
        self._draft: Final = draft
        self._triple: Final = triple

    def headers(self, decision: Decision) -> list[tuple[bytes, bytes]]:
        """The headers that say it. Retry-After is not among them: it goes with the `Denial`."""
        bound: i64 = max(decision._bound, 0)
        if bound >= len(self._left):
            return []
        remaining = str(decision._remaining).encode()
        reset = reset_of(decision)
        if self._draft and not self._triple and reset >= 0:
            return [self._policy, (b"ratelimit", self._left[bound] + remaining + b";t=" + str(reset).encode())]
        headers: list[tuple[bytes, bytes]] = []
        if self._draft:
            end = b"" if reset < 0 else b";t=" + str(reset).encode()
            headers += [self._policy, (b"ratelimit", self._left[bound] + remaining + end)]
        if self._triple:
            headers += [self._limits[bound], (b"x-ratelimit-remaining", remaining)]
            if reset >= 0:
                headers.append((b"x-ratelimit-reset", str(reset).encode()))
        return headers


def reset_of(decision: Decision) -> i64:
    """Whole seconds, rounded up, until everything is back; or, where nothing is left or it was denied, until the next
    passes: `NEVER` if no wait helps."""
    if decision._outcome is DENY:
        wait = decision.own_wait()
        return NEVER if wait == NEVER else _up(wait)
    if decision._remaining:
        return _up(decision._reset)
    return _up(decision._reset - i64(_rest(decision._limit)))


def _up(microseconds: i64) -> i64:
    return (microseconds + _SECOND - 1) // _SECOND


@lru_cache(maxsize=1024)
def _rest(limit: Limit) -> int:
    """Microseconds from the moment at which an empty limit lets one pass until it has everything back."""
    if not isinstance(limit, TokenBucket):
        return 0  # of a log, when the oldest leaves isn't told: it waits for the newest
    capacity, refill, per = limit.fields()
    return int((capacity - 1) * per * 1_000_000 / refill)
