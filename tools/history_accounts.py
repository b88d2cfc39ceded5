"""What counts in an account over time, from below and from above, where instants are known by bounds only.

For tools/check_history.py. Instants are whole numbers, `scale` to a microsecond, so that calls of one microsecond have
an order. A change counts after its instant, and a call sees what counted before its own.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from operator import itemgetter
from typing import Any, Final, NamedTuple

NEVER: Final = 1 << 100  # after everything
ENDLESS: Final = 1 << 90  # more than anything can cost
BLOCK: Final = 512

Move = tuple[
    int, int, bool, int, int
]  # first and last instant, whether it is sure, least and most that counts after it
Step = tuple[int, int]  # instant, change


class Limit(NamedTuple):
    kind: str
    most: int  # units
    unit: int = 1  # units of one token
    rate: int = 0  # units that come back per microsecond
    span: int = 0  # microseconds until a cost stops counting
    starts: tuple[int, ...] = ()


def read_limit(record: Mapping[str, Any]) -> Limit:
    kind = record["kind"]
    if kind == "bucket":
        rate = Fraction(str(record["refill"])) / Fraction(str(record["per"])) / 1_000_000
        return Limit(kind, int(record["capacity"]) * rate.denominator, rate.denominator, rate.numerator)
    if kind == "window":
        return Limit(kind, int(record["most"]), span=int(Fraction(str(record["seconds"])) * 1_000_000))
    if kind == "slots":
        return Limit(kind, int(record["most"]))
    if kind == "budget":
        return Limit(kind, int(record["amount"]), starts=tuple(sorted(record.get("periods") or ())))
    if kind == "meter":
        return Limit(kind, ENDLESS)
    raise ValueError(f"kind {kind!r}")


@dataclass(slots=True)
class Part:
    """A cost that counts in an account from one instant on, and what becomes of it."""

    line: str
    moves: list[Move]
    exists: bool = True  # for certain
    admitted: bool = True  # had to fit: no charge and no overdraft of a settle
    refund: bool = False
    held: bool = False  # by a hold, settled or not

    def steps(self, upper: bool) -> list[Step]:
        """The least or the most that counts, as changes: each counts after its instant."""
        if not self.exists and upper == self.refund:
            return []
        if len(self.moves) == 1:
            first, last, _, low, high = self.moves[0]
            at = first if upper != self.refund else last
            return [(at, high if upper else low)] if at < NEVER else []
        points = {move[0] for move in self.moves} | {move[1] for move in self.moves if move[2]}
        found, value = [], 0
        for point in sorted(points):
            if point >= NEVER:
                break
            done = -1  # the last move that is surely made
            for index, move in enumerate(self.moves):
                if move[2] and move[1] <= point:
                    done = index
            after = [
                move for index, move in enumerate(self.moves) if index == done or (index > done and move[0] <= point)
            ]
            values = [move[4] if upper else move[3] for move in after] + ([0] if done < 0 else [])
            new = max(values) if upper else min(values)
            if new != value:
                found.append((point, new - value))
                value = new
        return found


class Curve:
    """What counts in an account over time, from below or from above: changes at marks, refilled in between."""

    def __init__(self, marks: list[int], flat: list[int], slope: list[float], rate: int, scale: int) -> None:
        self.marks, self.flat, self.slope, self.rate, self.scale = marks, flat, slope, rate, scale
        if rate:
            self.after = [self._at(index, mark) for index, mark in enumerate(marks, 1)]
            self.before = [self._at(index, mark) for index, mark in enumerate(marks)]
        else:
            self.after, self.before = flat, [0, *flat[:-1]]
        self._blocks: dict[bool, list[int]] = {}

    def _at(self, index: int, instant: int) -> int:
        """The value at an instant that follows so many marks."""
        if index == 0:
            return 0
        flat = self.flat[index - 1]
        if self.rate and (slope := self.slope[index - 1]) > (used := self.rate * (instant // self.scale)):
            flat += int(slope) - used
        return max(flat, 0)

    def least(self, first: int, last: int) -> int:
        start, end = bisect_left(self.marks, first), bisect_left(self.marks, last)
        value = self._at(end, last)
        return value if start == end else max(0, min(value, self._extreme(self.before, start, end, min)))

    def most(self, first: int, last: int) -> int:
        start, end = bisect_left(self.marks, first), bisect_left(self.marks, last)
        value = self._at(start, first)
        return value if start == end else max(value, self._extreme(self.after, start, end, max))

    def peak(self) -> tuple[int, int]:
        """The highest value, and its mark."""
        value = max(self.after, default=0)
        return value, self.marks[self.after.index(value)] if self.marks else 0

    def _extreme(self, values: list[int], start: int, end: int, pick: Callable[[Iterable[int]], int]) -> int:
        left, right = -(-start // BLOCK), end // BLOCK
        if right - left < 4:
            return pick(values[start:end])
        top = pick is max
        if top not in self._blocks:
            self._blocks[top] = [pick(values[at : at + BLOCK]) for at in range(0, len(values), BLOCK)]
        inner = self._blocks[top][left:right]
        return pick([*values[start : left * BLOCK], *inner, *values[right * BLOCK : end]])


class Deficit:
    """The largest of `sum of the values from a place on, plus the place's own height`, while values change."""

    def __init__(self, heights: Sequence[int]) -> None:
        self._size = 1 << max(len(heights) - 1, 0).bit_length()
        self._heights = heights
        self._sums = [0] * (2 * self._size)
        self.best: list[float] = [-inf] * (2 * self._size)  # the root is best[1]; a place counts once it has changed

    def add(self, place: int, value: int) -> None:
        node, sums, best = self._size + place, self._sums, self.best
        sums[node] += value
        best[node] = sums[node] + self._heights[place]
        node >>= 1
        while node:
            left, right = 2 * node, 2 * node + 1
            sums[node] = sums[left] + sums[right]
            ahead, behind = best[right], best[left] + sums[right]
            best[node] = ahead if ahead > behind else behind  # noqa: FURB136 - `max` takes twice as long
            node >>= 1


@dataclass(slots=True)
class Book:
    """All that counts in one account, in one period."""

    limit: Limit
    scale: int
    exact: bool
    parts: list[Part] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)

    def curve(self, name: str) -> Curve:
        """low: the least that counts; high: the most; firm: the least of what had to fit."""
        if name not in self.curves:
            parts = self.parts
            exact = self.exact and all([part.exists and all([move[2] for move in part.moves]) for part in parts])
            if name == "firm":
                parts = [part for part in parts if part.admitted]
                if len(parts) == len(self.parts):
                    return self.curve("low")
            if name == "high" and not (exact and self.limit.kind != "window"):
                parts = [part for part in parts if not part.refund]
            upper = name == "high"
            self.curves[name] = self._refilled(parts, upper) if self.limit.rate else self._summed(parts, upper, exact)
        return self.curves[name]

    def _summed(self, parts: list[Part], upper: bool, exact: bool) -> Curve:
        steps = [(at, change, part) for part in parts for at, change in part.steps(upper)]
        steps.sort(key=itemgetter(0))
        flat, value, spent = [], 0, 0
        for _, by, part in steps:
            change = by
            if exact and part.refund and self.limit.kind == "budget":  # up to what was spent, at most what is held too
                change = max(by, -spent if upper else -max(value, 0))
            if not part.held:
                spent = max(spent + change, 0)
            value += change
            flat.append(value)
        return Curve([at for at, _, _ in steps], flat, [], 0, self.scale)

    def _refilled(self, parts: list[Part], upper: bool) -> Curve:
        """A bucket, as if each value that counts had been taken at its instant.

        From below, a cost was taken as early as it can have been, once it surely was; from above, as late as it can
        have been, and until then it counts in full. For a refund it is the other way round.
        """
        unit, rate, scale = self.limit.unit, self.limit.rate, self.scale
        late = [upper != part.refund for part in parts]
        own = [part.moves[0][1 if late[index] else 0] for index, part in enumerate(parts)]
        order = sorted(range(len(parts)), key=own.__getitem__)
        places = {index: place for place, index in enumerate(order)}
        tree = Deficit([rate * (own[index] // scale) for index in order])
        changes = [(at, 0, index, by * unit) for index, part in enumerate(parts) for at, by in part.steps(upper)]
        changes += [(own[index], 1, index, 0) for index in order if late[index] and own[index] < NEVER]
        changes.sort()
        waits, pending = dict.fromkeys([index for index in order if late[index]], 0), 0
        marks, flat, slope = [], [], []
        for at, placing, index, by in changes:
            if placing:
                pending -= (by := waits.pop(index))
                tree.add(places[index], by)
            elif index in waits:
                waits[index] += by
                pending += by
            else:
                tree.add(places[index], by)
            marks.append(at)
            flat.append(pending)
            slope.append(tree.best[1])
        return Curve(marks, flat, slope, rate, scale)

    def proof(self, at: int, upper: bool = False) -> list[str]:
        """The lines of what counts at an instant, the newest first."""
        found = []
        for part in self.parts:
            _, gone, _, _, most = part.moves[-1]
            if part.moves[0][0] >= at or (most == 0 and gone < at):
                continue
            value = sum([change for mark, change in part.steps(upper) if mark < at])
            if value:
                found.append((part.moves[0][0], value * self.limit.unit, part.line))
        found.sort(reverse=True)
        if self.limit.rate:  # only since the bucket was last full
            total, best, keep = 0, 0, 0
            for count, (first, value, _) in enumerate(found, 1):
                total += value
                if total - self.limit.rate * ((at - first) // self.scale) > best:
                    best, keep = total - self.limit.rate * ((at - first) // self.scale), count
            found = found[:keep]
        return list(dict.fromkeys([line for _, _, line in found]))
