"""Check a history of checks, holds and settles: who asked what, when, and what was said.

    python tools/check_history.py [--lenient-denials] FILE...

Exit 0: what was said can be explained. Exit 1: it can't; the first crimes are listed with the lines that prove them.
Exit 2: the files are no history. Several files are parts of one history. Nothing of headgate is imported.

A history is JSON Lines. Some lines declare limits (again, if they declare the same):

    {"limit": "L1", "kind": "bucket", "capacity": 10, "refill": 60, "per": 60}       per: seconds
    {"limit": "L2", "kind": "window", "most": 100, "seconds": 60}
    {"limit": "L3", "kind": "slots", "most": 5}
    {"limit": "L4", "kind": "budget", "amount": 500, "periods": [0, 86400000000]}    starts; absent: one for all time
    {"limit": "L5", "kind": "meter"}                                                 counts, and limits nothing

The others are one call each. Times are whole microseconds of one clock:

    {"verb": "hold", "key": "a", "limits": ["L1", "L3"], "cost": 5, "hold": "h1", "lease": 60000000, "release": false,
     "called": 10, "returned": 12, "said": "passed"}

verb      check, hold, extend, settle, cancel, find, charge, refund, peek or usage
key       who is counted; each pair of key and limit is an account, unused when the history begins
limits    names, or pairs [name, key] where an account is another key's; not needed for verbs on a hold that exists
cost      a whole number, or a list with one for each of the limits (for extend, settle, find: of the hold's); default
          1, for extend 0; a settle must have it. Slots ignore it: a hold takes one, a check needs a free one. A hold
          of 0 takes nothing, and passes only where 1 would; an extend of 0 may be denied where there is a debt
hold      the hold's id (hold, extend, settle, cancel, find)
lease     microseconds (hold; extend: absent if the lease is left alone)
release   hold: whether its cost comes back at the end of the lease; default false
forced    hold: whether it passes whatever is left, as its extends do; default false
state     of a find that passed: open, expired, settled or cancelled, with the reserved or settled `cost`. One that is
          refused knows no such hold. After all other calls on its hold, it says which of the unknown ones took effect
called    when the call began
returned  when it ended. null: its caller never knew, and it may take effect at any time after `called`, or never
said      passed; denied; refused (it changed nothing for another reason: an ended hold, a bad argument);
          error or null: it took effect or not. With null and a `returned`, then not after that
retry     of a denial: the microseconds until the same call passes if nothing else happens, or null
remaining of a peek: what the first of its limits had left, whole tokens; a debt may be 0 or negative
counted   of usage: what the first of its limits, a meter, has counted in all

A call takes effect at one instant within [called, returned]. Where all that returned did so at the instant of the
call, the history is exact, its lines are in order, and the verdict is exact. Otherwise it is sound: only what is
certain convicts. A hold, settle or cancel with the same id and the same arguments is the same one. A settle that
passed after the lease had ended books its cost all the same. A refund in a window is judged by bounds.

Crimes: `exceeded` (a limit), `wrongly denied`, `retry too early`, `retry too late`, `booked twice` (a peek shows less
than what was taken leaves, or usage or a find more than was taken), `lost` (the other way round), `settled twice`
(with different costs), `ended` (an extend of a hold that had ended, or any verb that passed on a hold that was never
granted).
"""

import argparse
import json
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

if not __package__:  # run as a program
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.history_accounts import NEVER, Book, Limit, Move, Part, read_limit
from tools.history_calls import LOOKS, UNKNOWN, Account, Call, NoHistory, read_call, spread
from tools.history_finds import resolve

LISTED: Final = 12  # lines that a verdict names as proof
PROVEN: Final = 10  # crimes that get a proof: each is searched for in all of an account
RATES: Final = ("bucket", "window")

Needs = list[tuple[Account, int]]
Source = tuple[Account, int, bool]  # of a proof: what counts in an account at an instant, from below or from above


class Crime(NamedTuple):
    """What can't be explained, and the lines that prove it; the first is the line it was committed in."""

    kind: str
    text: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} (lines {', '.join(self.lines)})"


class History:
    """All calls of a history, and the books that they explain."""

    def __init__(self, limits: dict[str, Limit], calls: list[Call]) -> None:
        self.limits, self.calls = limits, calls
        self.exact = all([call.returned is None or call.returned == call.called for call in calls])
        self.scale = len(calls) + 2
        for index, call in enumerate(calls, 1):
            call.first = call.called * self.scale + (index if self.exact else 0)
            if call.returned is None or call.said == "error":
                call.last = NEVER
            else:
                call.last = call.first if self.exact else (call.returned + 1) * self.scale - 1
        self.books: dict[tuple[str, str, int], Book] = {}
        self.changes: dict[Account, list[int]] = {}  # when calls changed it, or may have
        self.gave_back: set[Account] = set()
        self.admissions: list[tuple[Call, int, int, Needs]] = []
        self.denials: list[tuple[Call, Needs]] = []
        self.crimes: list[tuple[Crime, list[Source]]] = []
        holds: dict[str, list[Call]] = {}
        for call in calls:
            if call.hold:
                holds.setdefault(call.hold, []).append(call)
            elif call.verb not in LOOKS:
                self._take(call)
        for group in holds.values():
            self._take_hold(self._resolve(group))
        for instants in self.changes.values():
            instants.sort()

    def _take(self, call: Call) -> None:
        """A check, charge or refund."""
        passed = call.said == "passed"
        needs = self._needs(call)
        if call.said == "denied" and call.verb == "check":
            self.denials.append((call, needs))
        if passed and call.verb == "check":
            self.admissions.append((call, call.first, call.last, needs))
        if not passed and call.said not in UNKNOWN:
            return
        sign = -1 if call.verb == "refund" else 1
        for account, cost in zip(call.accounts, call.costs, strict=True):
            if not self._counts_slots(account):
                self.changes.setdefault(account, []).append(call.first)
                moves = [(call.first, call.last, passed, sign * cost, sign * cost)]
                part = Part(call.line, moves, passed, call.verb != "charge", call.verb == "refund")
                self._add(account, part, call.first, call.last)

    def _needs(self, call: Call) -> Needs:
        least = 1 if call.verb == "hold" else 0
        pairs = zip(call.accounts, call.costs, strict=True)
        return [(account, 1 if self._counts_slots(account) else max(cost, least)) for account, cost in pairs]

    def _counts_slots(self, account: Account) -> bool:
        return self.limits[account[0]].kind == "slots"

    def _add(self, account: Account, part: Part, first: int, last: int) -> None:
        """Count a part in the period of an instant, or in each period that it may be in."""
        limit = self.limits[account[0]]
        if limit.span:
            start, end = part.moves[0][:2]
            part.moves.append((self._later(start, limit.span), self._later(end, limit.span), True, 0, 0))
        periods = self._periods(limit, first, last)
        for period in periods:
            mine = part if len(periods) == 1 else replace(part, exists=False)
            self._book(account, period).parts.append(mine)

    def _book(self, account: Account, period: int) -> Book:
        book = self.books.get((*account, period))
        if book is None:
            book = self.books[(*account, period)] = Book(self.limits[account[0]], self.scale, self.exact)
        return book

    def _periods(self, limit: Limit, first: int, last: int) -> range:
        if not limit.starts:
            return range(1)
        begin, end = (bisect_right(limit.starts, instant // self.scale) for instant in (first, last))
        return range(begin, end + 1)

    def _later(self, instant: int, span: int) -> int:
        """The natural end of what began at an instant: before all calls of its microsecond."""
        return NEVER if instant >= NEVER else (instant // self.scale + span) * self.scale

    def _resolve(self, group: list[Call]) -> list[Call]:
        """The calls on a hold, as far as a find knows what became of them."""
        calls, crimes = resolve(group, self.limits)
        for kind, text, lines in crimes:
            self._convict(kind, text, lines)
        return calls

    def _take_hold(self, group: list[Call]) -> None:
        """All calls with one hold's id, of which repeated ones are the same."""
        tries = [call for call in group if call.verb == "hold"]
        self.denials += [(call, self._needs(call)) for call in tries if call.said == "denied"]
        calls = [call for call in group if call.said == "passed" or call.said in UNKNOWN]
        taken = [call for call in calls if call.verb == "hold"]
        passed = [call for call in calls if call.said == "passed"]
        if not taken:
            for call in passed:
                self._convict("ended", f"{call.verb} passed on {call.hold}, which was never granted", [call.line])
            return
        hold = taken[0]
        for call in taken:
            if (call.accounts, call.costs, call.lease, call.release) != (
                hold.accounts, hold.costs, hold.lease, hold.release,
            ):  # fmt: skip
                raise NoHistory(
                    f"line {call.line}: expected the arguments of {call.hold} in line {hold.line}, got others"
                )
        first = min([call.first for call in taken])
        sure = bool(passed)
        last = min([call.last for call in passed]) if sure else max([call.last for call in taken])
        if sure and not hold.forced and any([call.said == "passed" for call in taken]):
            line = next(call for call in taken if call.said == "passed")
            self.admissions.append((line, first, last, self._needs(hold)))
        ends = [call for call in calls if call.verb in ("settle", "cancel")]
        booked = [call for call in ends if call.said == "passed"]
        for call in booked:
            if _final(call) != _final(booked[0]):
                text = f"{call.hold}, with {call.costs} and before with {booked[0].costs}"
                self._convict("settled twice", text, [call.line, booked[0].line])
        end: Move | None = None
        if ends:
            until = min([call.last for call in booked]) if booked else max([call.last for call in ends])
            end = (min([call.first for call in ends]), until, bool(booked), 0, 0)
        extends = sorted([call for call in group if call.verb == "extend"], key=lambda call: call.first)
        expiry = self._expiry(hold, (first, last, sure, 0, 0), end, extends)
        extends = [call for call in extends if call.said == "passed" or call.said in UNKNOWN]
        for index, account in enumerate(hold.accounts):
            self.changes.setdefault(account, []).extend([call.first for call in calls])
            if self._counts_slots(account):
                moves = [(first, last, sure, 1, 1), expiry, *([end] if end else [])]
                self._add(account, Part(hold.line, moves, sure, not hold.forced, held=True), first, last)
            else:
                self._take_cost(account, index, hold, (first, last, sure, 0, 0), expiry, extends, end, ends)

    def _expiry(self, hold: Call, start: Move, end: Move | None, extends: list[Call]) -> Move:
        """The end of the lease; on the way, extends are judged."""
        lease = hold.lease or 0
        low, high = self._later(start[0], lease), self._later(start[1], lease)
        for call in extends:
            needs = [
                (account, cost)
                for account, cost in zip(hold.accounts, spread(call.costs, len(hold.accounts)), strict=True)
                if not self._counts_slots(account)
            ]
            is_open = start[2] and start[1] <= call.first and call.last < low and (not end or call.last < end[0])
            if call.said == "denied" and is_open and any([cost for _, cost in needs]):
                self.denials.append((call, needs))
            if call.said == "passed":
                if not hold.forced:
                    self.admissions.append((call, call.first, call.last, needs))
                if call.first >= high or (end and end[2] and call.first > end[1]):
                    self._convict("ended", f"extend passed on {call.hold}, which had ended", [call.line, hold.line])
            if call.lease is not None and (call.said == "passed" or call.said in UNKNOWN):
                later = self._later(call.first, call.lease)
                low = later if call.said == "passed" else min(low, later)
                high = max(high, self._later(call.last, call.lease))
        return (low, high, True, 0, 0)

    def _take_cost(
        self, account: Account, index: int, hold: Call, start: Move, expiry: Move, extends: list[Call],
        end: Move | None, ends: list[Call],
    ) -> None:  # fmt: skip
        """The parts of a hold's cost: what was reserved, what extends added, and what a settle charged on top."""
        rated = self.limits[account[0]].kind in RATES
        count = len(hold.accounts)
        costs = [hold.costs[index], *[spread(call.costs, count)[index] for call in extends]]
        sure = [True, *[call.said == "passed" for call in extends]]
        least, most = sum([cost for cost, known in zip(costs, sure, strict=True) if known]), sum(costs)
        finals = [0 if call.verb == "cancel" else spread(call.costs, count)[index] for call in ends]
        low, high = (min(finals), max(finals)) if finals else (0, 0)
        came_late = hold.release and end is not None and end[1] > expiry[0]  # or may have
        if (finals and low < most) or hold.release:
            self.gave_back.add(account)
        before = before_sure = 0
        for place, (cost, known) in enumerate(zip(costs, sure, strict=True)):
            call = extends[place - 1] if place else hold
            moves = [(call.first, call.last, known, cost, cost) if place else (*start[:3], cost, cost)]
            if hold.release:
                moves.append(expiry)
            if end:
                kept, kept_most = min(cost, max(low - before, 0)), min(cost, max(high - before_sure, 0))
                if came_late or (low < most and place and (rated or not all(sure))):
                    kept = 0  # what is booked late, after it came back, didn't have to fit
                if not place and rated and cost < high < most:
                    kept_most = high  # as if all of it had been taken at the instant of the hold
                if came_late and not rated:
                    kept_most = 0  # it counts below
                moves.append((*end[:3], kept, kept_most))
            before, before_sure = before + cost, before_sure + (cost if known else 0)
            if cost:
                part = Part(call.line, moves, start[2] and known, not hold.forced, held=True)
                self._add(account, part, start[0], start[1])
        over = high if came_late else max(0, high - least)
        if end and over:
            moves = [(*end[:3], low if came_late and not rated else max(0, low - most), over)]
            self._add(account, Part(ends[0].line, moves, end[2], admitted=False, held=True), start[0], start[1])

    def _convict(self, kind: str, text: str, lines: Sequence[str], proof: Sequence[Source] = ()) -> None:
        self.crimes.append((Crime(kind, text, tuple(lines)), list(proof)))

    def verdict(self) -> list[Crime]:
        """All crimes, in the order of their lines; the first with their proof."""
        places = {call.line: index for index, call in enumerate(self.calls)}
        self.crimes.sort(key=lambda pair: places[pair[0].lines[0]])
        found: list[Crime] = []
        for crime, sources in self.crimes:
            lines = list(crime.lines)
            for account, at, upper in sources if len(found) < PROVEN else ():
                lines += next(self.spans(account, at, at))[0].proof(at, upper)
            lines = list(dict.fromkeys(lines))
            found.append(crime._replace(lines=(*lines[:LISTED], *(["…"] if len(lines) > LISTED else []))))
        return found

    def spans(self, account: Account, first: int, last: int) -> Iterator[tuple[Book, int, int]]:
        """The books that an instant may be in, and its bounds in each."""
        limit = self.limits[account[0]]
        for period in self._periods(limit, first, last):
            begin = limit.starts[period - 1] * self.scale if limit.starts and period else first
            end = limit.starts[period] * self.scale if period < len(limit.starts) else last
            yield self._book(account, period), max(first, begin), min(last, end)

    def least(self, account: Account, first: int, last: int) -> int:
        """The least that counted at any instant between two, in units."""
        return min([book.curve("low").least(*bounds) for book, *bounds in self.spans(account, first, last)])

    def most(self, account: Account, first: int, last: int) -> int:
        return max([book.curve("high").most(*bounds) for book, *bounds in self.spans(account, first, last)])

    def short(self, account: Account, need: int, taken: int) -> bool:
        limit = self.limits[account[0]]
        return taken + need * limit.unit > limit.most

    def judge_admissions(self) -> None:
        guilty = set()
        for call, first, last, needs in self.admissions:
            for account, need in needs:
                least = self.least(account, first, last)
                if need and self.short(account, need, least):
                    guilty.add(account)
                    text = f"{call.verb} of {need} passed, {self._state(account, least, 'at least')}"
                    self._convict("exceeded", text, [call.line], [(account, last, False)])
        for (name, key, _), book in [] if self.exact else list(self.books.items()):
            value, mark = book.curve("firm").peak()
            if value > book.limit.most and (name, key) not in guilty:
                text = f"passed together, {self._state((name, key), value, 'at least')}"
                self._convict("exceeded", text, book.proof(mark + 1))

    def _state(self, account: Account, taken: int, bound: str) -> str:
        limit = self.limits[account[0]]
        return f"{account[0]} of {account[1]}: {bound} {taken / limit.unit:g} of {limit.most // limit.unit} taken"

    def judge_denials(self, lenient: bool) -> None:
        for call, needs in self.denials:
            if lenient and any([account in self.gave_back for account, _ in needs]):
                continue
            states = [(account, need, self.most(account, call.first, call.last)) for account, need in needs]
            if not any([self.short(*state) for state in states]):
                text = "; ".join([self._state(account, most, "at most") for account, _, most in states])
                proof = [(account, call.last, True) for account, _, _ in states]
                self._convict("wrongly denied", f"{call.verb} of {call.costs[0]}, {text}", [call.line], proof)
            elif self.exact and call.retry is not None:
                self._judge_retry(call, needs)

    def _judge_retry(self, call: Call, needs: Needs) -> None:
        """Whether the wait of a denial is the shortest that suffices, if nothing happens meanwhile."""
        assert call.retry is not None
        ready = (call.called + call.retry) * self.scale + 1
        for account, _ in needs:
            changes = self.changes.setdefault(account, [])
            after = bisect_right(changes, call.first)
            if after < len(changes) and changes[after] <= ready:
                return
        for account, need in needs:
            least = self.least(account, ready, ready)
            if self.short(account, need, least):
                text = f"at {call.called + call.retry}, {self._state(account, least, 'still at least')}"
                self._convict("retry too early", text, [call.line], [(account, ready, False)])
                return
        just = max(ready - self.scale, call.first)
        if call.retry and not any(
            [self.short(account, need, self.most(account, just, just)) for account, need in needs]
        ):
            self._convict(
                "retry too late", f"{call.verb} would have passed before {call.called + call.retry}", [call.line]
            )

    def judge_peeks(self, lenient: bool) -> None:
        for call in self.calls:
            if call.verb != "peek" or call.said not in ("passed", "denied"):
                continue
            account = call.accounts[0]
            limit = self.limits[account[0]]
            least, most = self.least(account, call.first, call.last), self.most(account, call.first, call.last)
            low, high = (limit.most - most) // limit.unit, (limit.most - least) // limit.unit
            if call.shown < low and not (lenient and account in self.gave_back):
                text = f"{call.shown} remaining, {self._state(account, most, 'at most')}"
                self._convict("booked twice", text, [call.line], [(account, call.last, True)])
            elif call.shown > (high if call.shown < 0 else max(high, 0)):  # a debt may be told as 0
                text = f"{call.shown} remaining, {self._state(account, least, 'at least')}"
                self._convict("lost", text, [call.line], [(account, call.last, False)])

    def judge_usage(self) -> None:
        for call in self.calls:
            if call.verb == "usage" and call.said == "passed":
                account = call.accounts[0]
                least, most = self.least(account, call.first, call.last), self.most(account, call.first, call.last)
                if not least <= call.shown <= most:
                    text = f"{account[0]} of {account[1]} has counted {call.shown}, expected {least} to {most}"
                    proof = [(account, call.last, call.shown > most)]
                    self._convict("booked twice" if call.shown > most else "lost", text, [call.line], proof)


def _final(call: Call) -> tuple[int, ...]:
    """What a settle or cancel has counted."""
    return () if call.verb == "cancel" or not any(call.costs) else call.costs


def check_history(records: Iterable[Mapping[str, Any]], *, lenient_denials: bool = False) -> list[Crime]:
    """The crimes of a history, in the order of its lines; none if all can be explained.

    With `lenient_denials` a denial is never wrong, and a peek never shows too little, where a settle, a cancel or an
    expiry gave back to a bucket or window: a store may give back less there than it could.

    >>> limit = {"limit": "L", "kind": "slots", "most": 1}
    >>> hold = {"verb": "hold", "key": "a", "limits": ["L"], "lease": 9, "called": 1, "returned": 1, "said": "passed"}
    >>> print(*check_history([limit, {**hold, "hold": "h1"}, {**hold, "hold": "h2"}]))
    exceeded: hold of 1 passed, L of a: at least 1 of 1 taken (lines 3, 2)
    """
    return _judge(((str(number), record) for number, record in enumerate(records, 1)), lenient_denials)


def _judge(records: Iterable[tuple[str, Mapping[str, Any]]], lenient: bool) -> list[Crime]:
    limits: dict[str, Limit] = {}
    calls = []
    for line, record in records:
        try:
            if "limit" in record:
                limit = read_limit(record)
                if limits.setdefault(record["limit"], limit) != limit:
                    raise NoHistory(f"line {line}: expected {record['limit']} as declared before, got {record}")
            else:
                calls.append(read_call(line, record, limits))
        except (KeyError, TypeError, ValueError) as failure:
            if isinstance(failure, NoHistory):
                raise
            raise NoHistory(f"line {line}: expected a limit or a call, got {record} ({failure!r})") from failure
    if not calls:
        raise NoHistory("expected calls, got none")
    history = History(limits, calls)
    history.judge_admissions()
    history.judge_denials(lenient)
    history.judge_peeks(lenient)
    history.judge_usage()
    return history.verdict()


def _read(files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for file in files:
        name = f"{file.name}:" if len(files) > 1 else ""
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield f"{name}{number}", json.loads(line)
                    except json.JSONDecodeError as failure:
                        raise NoHistory(f"line {name}{number}: expected JSON, got {line.strip()!r}") from failure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check a history of checks, holds and settles.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON Lines; several are one history")
    parser.add_argument("--lenient-denials", action="store_true", help="accept denials where rates were given back")
    parser.add_argument("--show", type=int, default=10, metavar="N", help="crimes to list (default: 10)")
    given = parser.parse_args(arguments)
    try:
        crimes = _judge(_read(given.files), given.lenient_denials)
    except (NoHistory, OSError) as failure:
        print(failure, file=sys.stderr)
        return 2
    for crime in crimes[: given.show]:
        print(crime)
    print(f"{len(crimes)} crimes" if crimes else "no crime")
    return 1 if crimes else 0


if __name__ == "__main__":
    sys.exit(main())
