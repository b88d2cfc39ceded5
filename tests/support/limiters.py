"""Limiters in memory, and what is left of their limits."""

from headgate import Limiter, ManualClock, MemoryStore


def make_limiter(limit: str, clock: ManualClock) -> Limiter:
    return Limiter(limit, store=MemoryStore(clock=clock), name="llm")


def left(limiter: Limiter, key: str = "a") -> int:
    return limiter.peek(key).remaining
