"""Violations: the consequences of repeated denials of one agent.

| so far                            | a denial comes   | the count becomes | the advised wait               |
|-----------------------------------|------------------|-------------------|--------------------------------|
| none                              | at any time      | 1                 | the first step                 |
| n, the last less than `quiet` ago |                  | n + 1             | step n + 1, or the last step   |
| n, the last `quiet` ago or longer |                  | 1                 | the first step                 |

An agent is *rate limited* while it has violations and the quiet period has not passed. With `enforce`, an agent that
comes back before the advised wait is over is denied even if its bucket has tokens, and that is a violation too.

An *alert* is raised by the violation that makes `alert_after` of them within a span of `alert_window`; then by none for
`alert_window`.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from headgate._native import i64, mypyc_attr
from headgate.errors import refuse
from headgate.limits.decision import Rule, State, Value
from headgate.limits.numbers import LARGEST, Number, microseconds, whole

_NEVER_ALERTED: Final[i64] = -(2**60)


@mypyc_attr(acyclic=True)
class ViolationRecord:
    """The violations of one agent: how many in a row, when the newest were, and when an alert was raised."""

    __slots__ = ("alerted", "count", "last", "newest")

    def __init__(self) -> None:
        self.count: i64 = 0
        self.last: i64 = 0
        self.alerted: i64 = _NEVER_ALERTED
        self.newest: list[int] = []


class Backoff(Rule):
    """How the advised wait grows with the violations, and when they raise an alert. Times are seconds."""

    __slots__ = ("_after", "_enforce", "_quiet", "_steps", "_window")

    def __init__(
        self,
        *,
        steps: Sequence[Number] = (1.0, 2.0, 5.0, 10.0, 30.0),
        quiet: Number = 60.0,
        enforce: bool = False,
        alert_after: int = 10,
        alert_window: Number = 300.0,
    ) -> None:
        self._steps: Final = tuple([microseconds("Backoff steps", step, LARGEST) for step in steps])
        if not self._steps:
            refuse("Backoff steps", "at least one", steps)
        self._quiet: Final[i64] = microseconds("Backoff quiet", quiet, LARGEST)
        self._enforce: Final = enforce
        self._after: Final[i64] = whole("Backoff alert_after", alert_after, 1000)
        self._window: Final[i64] = microseconds("Backoff alert_window", alert_window, LARGEST)

    @property
    def steps(self) -> tuple[float, ...]:
        """The advised waits of the first violation, the second, and so on; the last holds for all later ones."""
        return tuple([step / 1_000_000 for step in self._steps])

    @property
    def quiet(self) -> float:
        """Seconds without a violation after which the count starts again."""
        return self._quiet / 1_000_000

    @property
    def enforce(self) -> bool:
        """Whether the advised wait is enforced."""
        return self._enforce

    @property
    def alert_after(self) -> int:
        """How many violations raise an alert."""
        return self._after

    @property
    def alert_window(self) -> float:
        """The span in seconds within which they do, and for which no other alert follows."""
        return self._window / 1_000_000

    def integers(self) -> tuple[int, ...]:
        """Quiet period, alert window, violations to an alert, enforced or not, number of steps, steps. Microseconds."""
        return self._quiet, self._window, self._after, int(self._enforce), len(self._steps), *self._steps

    def fresh(self, now: i64) -> State:
        return ViolationRecord()

    def idle(self, state: State, now: i64) -> bool:
        assert isinstance(state, ViolationRecord)
        return state.count == 0 or now - state.last >= max(self._quiet, self._window)

    def count(self, state: State, now: i64) -> i64:
        """Violations in a row: 0 when the quiet period has passed."""
        assert isinstance(state, ViolationRecord)
        return state.count if now - state.last < self._quiet else 0

    def left(self, state: State, now: i64) -> i64:
        """Microseconds of the advised wait that are left."""
        count = self.count(state, now)
        assert isinstance(state, ViolationRecord)
        return 0 if count == 0 else max(state.last + self.advised(count) - now, 0)

    def standing(self, state: State, now: i64) -> "Standing":
        assert isinstance(state, ViolationRecord)
        quiet_left = i64(0) if state.count == 0 else max(state.last + self._quiet - now, 0)
        return Standing(self.count(state, now), self.left(state, now), quiet_left)

    def advised(self, count: i64) -> i64:
        return self._steps[min(count, i64(len(self._steps))) - 1]

    def record(self, state: State, now: i64) -> bool:
        """Count a violation, and say whether it raises an alert."""
        assert isinstance(state, ViolationRecord)
        now = max(now, state.last) if state.count else now  # a clock that stepped back stands still
        state.count = self.count(state, now) + 1
        state.last = now
        state.newest.append(now)
        if len(state.newest) > self._after:
            state.newest.pop(0)
        enough = len(state.newest) == self._after and now - state.newest[0] < self._window
        if not enough or now - state.alerted < self._window:
            return False
        state.alerted = now
        return True

    def _fields(self) -> tuple[object, ...]:
        return self._steps, self._quiet, self._enforce, self._after, self._window

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, self._fields()

    def __repr__(self) -> str:
        return (
            f"Backoff(steps={self.steps}, quiet={self.quiet}, enforce={self.enforce}, "
            f"alert_after={self.alert_after}, alert_window={self.alert_window})"
        )


def _restore(steps: Sequence[int], quiet: int, enforce: bool, after: int, window: int) -> Backoff:
    """A backoff from its fields."""
    return Backoff(
        steps=[Fraction(step, 1_000_000) for step in steps],
        quiet=Fraction(quiet, 1_000_000),
        enforce=enforce,
        alert_after=after,
        alert_window=Fraction(window, 1_000_000),
    )


class Standing(Value):
    """The standing of an agent: its violations in a row, and the seconds until they are forgotten."""

    __slots__ = ("_count", "_quiet_left", "_wait_left")

    def __init__(self, count: i64, wait_left: i64, quiet_left: i64) -> None:
        self._count: Final = count
        self._wait_left: Final = wait_left
        self._quiet_left: Final = quiet_left

    @property
    def violations(self) -> int:
        """Violations in a row; 0 once the quiet period has passed."""
        return self._count

    @property
    def wait_left(self) -> float:
        """Seconds of the advised wait that are left."""
        return self._wait_left / 1_000_000

    @property
    def quiet_left(self) -> float:
        """Seconds until the agent is no longer rate limited, if it keeps quiet."""
        return self._quiet_left / 1_000_000

    def __bool__(self) -> bool:
        return self._count > 0

    def _fields(self) -> tuple[int, int, int]:
        return self._count, self._wait_left, self._quiet_left

    def __repr__(self) -> str:
        return f"Standing(violations={self.violations}, wait_left={self.wait_left}, quiet_left={self.quiet_left})"
