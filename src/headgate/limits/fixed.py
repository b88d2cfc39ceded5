"""The two limits that count nothing: `UNLIMITED` and `BLOCKED`."""

from typing import Final

from headgate._native import i64
from headgate.limits.decision import NEVER, Decision, Limit, State, decide_one
from headgate.limits.numbers import LARGEST


class _Fixed(Limit):
    """A limit that counts nothing: everything passes, or nothing does."""

    __slots__ = ("_capacity", "_name", "_pass")

    def __init__(self, name: str, capacity: i64) -> None:
        self._name: Final = name
        self._capacity: Final = capacity
        self._pass: Final = decide_one(self, 0, capacity, False, 0)

    @property
    def capacity(self) -> int:
        return self._capacity

    def fresh(self, now: i64) -> State:
        return None

    def wait(self, state: State, now: i64, cost: i64) -> i64:
        return 0 if self._capacity else NEVER

    def spend(self, state: State, now: i64, cost: i64) -> None:
        return

    def refund(self, state: State, cost: i64) -> None:
        return

    def idle(self, state: State, now: i64) -> bool:
        return True

    def decide(self, state: State, now: i64, cost: i64, wait: i64, low: i64) -> Decision:
        return self._pass if wait == 0 else decide_one(self, wait, self._capacity, False, 0)

    def _fields(self) -> tuple[str]:
        return (self._name,)

    def __reduce__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return self._name

    def __str__(self) -> str:
        return self._name.lower()


UNLIMITED: Final = _Fixed("UNLIMITED", LARGEST)
"""Everything passes. `remaining` stays at 2**53 - 1."""

BLOCKED: Final = _Fixed("BLOCKED", 0)
"""Nothing passes, and no wait helps."""
