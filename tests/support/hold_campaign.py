"""A holder: tasks that hold, use, settle, extend, cancel and abandon, and write down each call for check_history.py.

Every call is a line before it is made, and once it has returned another one with the same number tells what was said:
so a holder that is killed leaves what it has asked. A holder that replaces another settles some of what that one has
left open.
"""

import asyncio
import json
import os
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from headgate import Decision, Limiter
from headgate.errors import HoldError, UnknownHold
from headgate.holds import Hold
from headgate.stores.redis import RedisStore
from tests.support.valkey import PATIENCE

TASKS: Final = 50
LEASE: Final = 0.6
"""Seconds of the longest lease."""
KEEP: Final = 3
"""Seconds for which ended holds are remembered."""
SLOTS: Final = 10

Line = dict[str, Any]


class LimitKind(NamedTuple):
    """Limits that are held together, under one name."""

    name: str
    limit: str
    parts: dict[str, str]
    """The limits one by one: their names in a history, and their texts."""
    keys: int
    gives_back: bool = True
    lenient: bool = False
    """Whether less may be given back than could be: buckets remember only so many headrooms."""
    key_seconds: float = 0
    """After which the next keys take over; 0 for never."""


_BUCKET, _SLOTS = "20/second burst 40", f"{SLOTS} in flight"
_WINDOW, _BUDGET = "60 per 2 seconds sliding", "400 tokens/calendar hour"

KINDS: Final = [
    LimitKind("mixed", f"{_BUCKET}; {_SLOTS}", {"bucket": _BUCKET, "slots": _SLOTS}, 3, lenient=True),
    LimitKind("spent", f"{_BUCKET}; {_SLOTS}", {"full": _BUCKET, "spots": _SLOTS}, 2, gives_back=False),
    LimitKind("window", _WINDOW, {"window": _WINDOW}, 2),
    LimitKind("places", _SLOTS, {"places": _SLOTS}, 2),
    LimitKind("budget", f"{_BUDGET}; {_SLOTS}", {"budget": _BUDGET, "seats": _SLOTS}, 2, key_seconds=5),
]


def declared_limits(starts_of_hours: Sequence[int]) -> list[Line]:
    """The limits as a history declares them."""
    slots = [{"limit": name, "kind": "slots", "most": SLOTS} for name in ("slots", "spots", "places", "seats")]
    buckets = [{"limit": name, "kind": "bucket", "capacity": 40, "refill": 20, "per": 1} for name in ("bucket", "full")]
    budget = {"limit": "budget", "kind": "budget", "amount": 400, "periods": list(starts_of_hours)}
    return [*slots, *buckets, {"limit": "window", "kind": "window", "most": 60, "seconds": 2}, budget]


def microseconds() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


class Record:
    """Writes down calls."""

    def __init__(self, file: Path) -> None:
        self._lines = file.open("w", buffering=1)
        self._numbers = count()

    def begin(self, line: Line) -> Line:
        begun = {**line, "call": next(self._numbers), "called": microseconds(), "returned": None, "said": None}
        self._write(begun)
        return begun

    def end(self, begun: Line, said: str, **more: Any) -> None:
        self._write({"call": begun["call"], "returned": microseconds(), "said": said, **more})

    def _write(self, line: Line) -> None:
        self._lines.write(json.dumps(line) + "\n")

    def close(self) -> None:
        self._lines.close()


def read_record(file: Path) -> list[Line]:
    """The calls in a file, each as far as it is known. The last line may be torn."""
    lines: dict[int, Line] = {}
    for text in file.read_text().split("\n")[:-1]:
        line = json.loads(text)
        lines.setdefault(line["call"], {}).update(line)
    return list(lines.values())


def orphans(file: Path) -> Iterator[Line]:
    """The holds that were granted, and that nobody has begun to end."""
    calls = read_record(file)
    ended = {line["hold"] for line in calls if line["verb"] in ("settle", "cancel")}
    return (line for line in calls if line["verb"] == "hold" and line["said"] == "passed" and line["hold"] not in ended)


class Holder(ABC):
    """Tasks on one store."""

    def __init__(self, store: RedisStore, record: Record, name: str, chance: random.Random) -> None:
        self._store, self._record, self._name, self._chance = store, record, name, chance
        self._numbers = count()

    @abstractmethod
    async def work(self) -> None:
        """One task: hold after hold, for ever."""

    @abstractmethod
    async def adopt(self, line: Line) -> None:
        """Settle a hold that another holder has left behind."""

    async def pause(self, least: float, most: float) -> None:
        await asyncio.sleep(self._chance.uniform(least, most))


class LimiterHolder(Holder):
    """Tasks with the limiters of all kinds."""

    def __init__(self, store: RedisStore, record: Record, name: str, chance: random.Random) -> None:
        super().__init__(store, record, name, chance)
        self._limiters = {kind.name: Limiter(kind.limit, store=store, name=kind.name) for kind in KINDS}
        self._parts = {
            part: Limiter(text, store=store, name=kind.name) for kind in KINDS for part, text in kind.parts.items()
        }

    def key_of(self, kind: LimitKind) -> str:
        turn = int(time.monotonic() / kind.key_seconds) if kind.key_seconds else 0
        return f"{kind.name}-{turn}-{self._chance.randrange(kind.keys)}"

    async def work(self) -> None:
        while True:
            kind = self._chance.choice(KINDS)
            key = self.key_of(kind)
            if self._chance.random() < 0.1:
                await self.peek(kind, key)
            held = await self.hold(kind, key, f"{self._name}-{next(self._numbers)}")
            if held is not None:
                await self.use(kind, *held)
            await self.pause(0.02, 0.2)

    async def peek(self, kind: LimitKind, key: str) -> None:
        part = self._chance.choice(list(kind.parts))
        begun = self._record.begin({"verb": "peek", "key": key, "limits": [part]})
        decision = await self._parts[part].apeek(key)
        self._record.end(begun, verdict(decision), remaining=decision.remaining)

    async def hold(self, kind: LimitKind, key: str, hold_id: str) -> tuple[Hold, int] | None:
        """A hold and its cost, if it is granted. Now and then it is asked for twice."""
        cost, lease = self._chance.randint(1, 5), round(self._chance.uniform(LEASE / 3, LEASE), 3)
        on_expiry: Literal["keep", "release"] = "release" if self.may(kind, 0.3) else "keep"
        line = {
            "verb": "hold", "key": key, "limits": list(kind.parts), "cost": cost, "hold": hold_id,
            "lease": round(lease * 1_000_000), "release": on_expiry == "release",
        }  # fmt: skip
        hold = None
        for _ in range(2 if self._chance.random() < 0.1 else 1):
            begun = self._record.begin(line)
            try:
                hold = await self._limiters[kind.name].ahold(
                    key, cost, lease=lease, hold_id=hold_id, on_expiry=on_expiry, keep=KEEP
                )
            except HoldError:
                self._record.end(begun, "refused")
                return None
            self._record.end(begun, verdict(hold.decision) if hold else "denied")
        return (hold, cost) if hold else None

    def may(self, kind: LimitKind, share: float) -> bool:
        """Whether to do what gives something back, in this share of cases."""
        return kind.gives_back and self._chance.random() < share

    async def use(self, kind: LimitKind, hold: Hold, cost: int) -> None:
        """Do something with a hold, and end it, or leave it behind."""
        await self.pause(0, 0.1)
        if self._chance.random() < 0.15:
            more, lease = self._chance.randint(0, 3), round(self._chance.uniform(LEASE / 3, LEASE), 3)
            line = {"verb": "extend", "key": hold.key, "hold": hold.id, "cost": more, "lease": round(lease * 1_000_000)}
            if await self.call(line, lambda: hold.aextend(more or None, lease=lease)) == "passed":
                cost += more
            await self.pause(0, 0.1)
        fate = self._chance.random()
        if fate < 0.15:
            return  # abandoned
        if fate < 0.25:
            await self.pause(LEASE, 1.5 * LEASE)  # until its lease has ended
        end: Callable[[], Awaitable[Decision]] = hold.asettle
        line = {"verb": "settle", "key": hold.key, "hold": hold.id}
        if self.may(kind, 0.2):
            line["verb"], end = "cancel", hold.acancel
        else:
            least = 0 if kind.gives_back else cost
            line["cost"] = self._chance.randint(least, cost + (2 if self._chance.random() < 0.2 else 0))
            hold.use(line["cost"])
        for _ in range(2 if self._chance.random() < 0.15 else 1):
            await self.call(line, end)

    async def adopt(self, line: Line) -> None:
        limiter = self._limiters[line["key"].partition("-")[0]]
        try:
            hold = await limiter.afind_hold(line["key"], line["hold"])
        except UnknownHold:
            return
        cost = line["cost"] + 1
        await self.call(
            {"verb": "settle", "key": line["key"], "hold": line["hold"], "cost": cost}, lambda: hold.asettle(cost)
        )

    async def call(self, line: Line, verb: Callable[[], Awaitable[Decision]]) -> str:
        begun = self._record.begin(line)
        try:
            decision = await verb()
        except HoldError:
            told = "refused"
        else:
            told = verdict(decision) if line["verb"] == "extend" else "passed"
        self._record.end(begun, told)
        return told


def verdict(decision: Decision) -> str:
    assert not decision.degraded
    return "passed" if decision else "denied"


async def run(kind: type[Holder], url: str, file: str, seed: str, *before: str) -> None:
    """A holder in a process of its own, which settles some of what those before it have left behind."""
    name = f"holder-{seed}"
    record, chance = Record(Path(file)), random.Random(int(seed))
    async with RedisStore(f"{url}?client_name={name}", timeout=PATIENCE) as store:
        holder = kind(store, record, name, chance)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(_end_with_parent))
            for one in before:
                for line in orphans(Path(one)):
                    if chance.random() < 0.5:
                        tasks.create_task(holder.adopt(line))
            for _ in range(TASKS):
                tasks.create_task(holder.work())


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(3)


if __name__ == "__main__":
    asyncio.run(run(LimiterHolder, *sys.argv[1:]))
