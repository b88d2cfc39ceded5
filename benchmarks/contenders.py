"""The rate limiters in memory, each set up and called as in its own documentation.

A contender has its own loop over the keys. So each is called as its users call it, without a wrapper that would add
cost, and the loop around the call is the same statement for all.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, NamedTuple

import limits
import pyrate_limiter
import throttled
import token_bucket
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter, MovingWindowRateLimiter, RateLimiter

from headgate import Gate, Limiter, MemoryStore, Policy, TokenBucket

HEADGATE: Final = "headgate"
GATE: Final = "headgate, Gate.check"
FLOOR: Final = "floor"
LIMITS_FIXED: Final = "limits, fixed window"
LIMITS_MOVING: Final = "limits, moving window"
THROTTLED: Final = "throttled-py, token bucket"
PYRATE: Final = "pyrate-limiter, in-memory bucket"
TOKEN_BUCKET: Final = "token-bucket"

Loop = Callable[[Iterable[str]], None]


class Quota(NamedTuple):
    """A limit per key, in terms of both a window and a bucket."""

    size: int
    """Requests per window, or capacity of the bucket."""
    seconds: int
    """Length of the window."""
    refill: int
    """Tokens that a bucket gains in that time."""


# No check is denied, and no bucket is full before its next check: a limiter may drop a full bucket.
ROOMY: Final = Quota(1_000_000, 86_400, refill=100)
ROOMY_HOUR: Final = Quota(500_000, 3_600, refill=50)
# One token in more than two hours: an empty bucket stays empty for the whole run.
TIGHT: Final = Quota(10, 86_400, refill=10)
SLOW: Final = Quota(100, 86_400, refill=100)


@dataclass(frozen=True)
class Contender:
    """A rate limiter, ready to be called."""

    run: Loop
    """Check every key."""
    passes: Callable[[str], bool]
    """Check one key and return the outcome, to verify that a run measured the intended case."""
    settle: Callable[[], None] = lambda: None
    """Wait for its background work, so that no other contender pays for it."""
    kept: Callable[[], int] | None = None
    """Number of keys it keeps, if it tells."""


Build = Callable[[list[Quota]], Contender]


def contender(
    check: Callable[[str], object], passes: Callable[[str], bool], kept: Callable[[], int] | None = None
) -> Contender:
    """A contender whose check takes nothing but the key."""

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            check(key)

    return Contender(run, passes, kept=kept)


def headgate(quotas: list[Quota]) -> Contender:
    store = MemoryStore()
    limiter = Limiter([TokenBucket(quota.size, quota.refill, quota.seconds) for quota in quotas], store=store)
    check = limiter.check
    return contender(check, lambda key: bool(check(key)), lambda: len(store))


def headgate_gate(quotas: list[Quota]) -> Contender:
    """With a policy that classifies the action, and without listeners."""
    limits = [TokenBucket(quota.size, quota.refill, quota.seconds) for quota in quotas]
    check = Gate(Policy(limits={"normal": limits})).check

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            check(key, "ws", action="message")

    return Contender(run, lambda key: bool(check(key, "ws", action="message")))


def limits_fixed_window(quotas: list[Quota]) -> Contender:
    storage = MemoryStorage()
    return _limits(storage, FixedWindowRateLimiter(storage), quotas, lambda: len(storage.storage))


def limits_moving_window(quotas: list[Quota]) -> Contender:
    storage = MemoryStorage()
    return _limits(storage, MovingWindowRateLimiter(storage), quotas, lambda: len(storage.events))


def _limits(storage: MemoryStorage, strategy: RateLimiter, quotas: list[Quota], kept: Callable[[], int]) -> Contender:
    items = [limits.RateLimitItemPerSecond(quota.size, quota.seconds) for quota in quotas]
    first, last = items[0], items[-1]
    hit = strategy.hit

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            hit(first, key)

    def run_two(keys: Iterable[str]) -> None:
        for key in keys:
            hit(first, key) and hit(last, key)

    def settle() -> None:
        # This thread scans all keys 10 ms after a hit. While limits is timed, that is part of its cost.
        storage.timer.join()

    def passes(key: str) -> bool:
        return all([hit(item, key) for item in items])

    return Contender(run if len(items) == 1 else run_two, passes, settle, kept)


def throttled_py(quotas: list[Quota]) -> Contender:
    (quota,) = quotas
    throttle = throttled.Throttled(
        using=throttled.RateLimiterType.TOKEN_BUCKET.value,
        quota=throttled.per_duration(timedelta(seconds=quota.seconds), limit=quota.refill, burst=quota.size),
        store=throttled.MemoryStore(options={"MAX_SIZE": 2**40}),  # no eviction
    )
    limit = throttle.limit
    return contender(limit, lambda key: not limit(key).limited)


class _BucketPerKey(pyrate_limiter.BucketFactory):
    """A bucket per name, as in "Custom routing with BucketFactory" in pyrate-limiter's documentation."""

    def __init__(self, rates: list[pyrate_limiter.Rate]) -> None:
        self.rates = rates
        self.clock = pyrate_limiter.MonotonicClock()
        self.buckets: dict[str, pyrate_limiter.AbstractBucket] = {}

    def wrap_item(self, name: str, weight: int = 1) -> pyrate_limiter.RateItem:
        return pyrate_limiter.RateItem(name, self.clock.now(), weight=weight)

    def get(self, item: pyrate_limiter.RateItem) -> pyrate_limiter.AbstractBucket:
        if item.name not in self.buckets:
            self.buckets[item.name] = self.create(pyrate_limiter.InMemoryBucket, self.rates)
        return self.buckets[item.name]


def pyrate(quotas: list[Quota]) -> Contender:
    rates = [pyrate_limiter.Rate(quota.size, quota.seconds * 1000) for quota in quotas]
    factory = _BucketPerKey(sorted(rates, key=lambda rate: rate.interval))
    try_acquire = pyrate_limiter.Limiter(factory).try_acquire

    def run(keys: Iterable[str]) -> None:
        for key in keys:
            try_acquire(key, blocking=False)

    return Contender(run, lambda key: bool(try_acquire(key, blocking=False)), kept=lambda: len(factory.buckets))


def token_bucket_py(quotas: list[Quota]) -> Contender:
    (quota,) = quotas
    limiter = token_bucket.Limiter(quota.refill / quota.seconds, quota.size, token_bucket.MemoryStorage())
    return contender(limiter.consume, limiter.consume)


LIBRARIES: Final[dict[str, Build]] = {
    HEADGATE: headgate,
    GATE: headgate_gate,
    LIMITS_FIXED: limits_fixed_window,
    LIMITS_MOVING: limits_moving_window,
    THROTTLED: throttled_py,
    PYRATE: pyrate,
    TOKEN_BUCKET: token_bucket_py,
}
# The others support one limit at a time. So does limits, but its documentation says to hit one after the other.
SEVERAL_LIMITS: Final = (HEADGATE, GATE, LIMITS_FIXED, LIMITS_MOVING, PYRATE)


class NoFloorError(Exception):
    """The floor couldn't be compiled."""


def compile_floor(folder: Path) -> Callable[[Iterable[str]], Contender]:
    """Compile `floor.py` in a folder, and return a function that makes a contender with some known keys."""
    shutil.copy(Path(__file__).with_name("floor.py"), folder)
    done = subprocess.run(
        [sys.executable, "-m", "mypyc", "floor.py"],
        cwd=folder,
        env={**os.environ, "MYPYC_OPT_LEVEL": "3", "MYPYC_DEBUG_LEVEL": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    compiled = [path for path in folder.glob("floor.*") if path.suffix != ".py"]
    if done.returncode or not compiled:
        raise NoFloorError((done.stderr or done.stdout).strip())
    spec = importlib.util.spec_from_file_location("floor", compiled[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def build(keys: Iterable[str]) -> Contender:
        check = module.Floor(keys).check
        return contender(check, lambda key: check(key) == key)

    return build
