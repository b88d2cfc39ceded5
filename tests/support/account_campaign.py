"""A holder of accounts: tasks that hold on five levels at once, and write down each call for check_history.py.

Each hold asks for some resources on all levels above a session: organisation, team, group, agent, session. Roots are
replaced by others every few seconds, so that their budgets are met and renewed. A holder that replaces another settles
some of what that one has left open, by what the store remembers of it.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from headgate import UNLIMITED, Limit
from headgate.errors import HoldError
from headgate.limits.meter import Meter
from headgate.limits.notation import parse
from headgate.stores.base import Ask
from headgate.stores.holds import HoldAnswer, HoldTerms
from tests.support.hold_campaign import Holder, Line, run

LEASE: Final = 1_500_000
"""Microseconds of the longest lease."""
KEEP: Final = 7200_000_000
"""Microseconds for which ended holds are remembered: until all is over."""
LOW: Final = 200
LEVELS: Final = 5
ROOTS: Final = 2
"""Of each kind, at the same time."""
ROOT_SECONDS: Final = 15

_SLOTS: Final = (24, 13, 7, 4, 3)
_TOKENS: Final = (120, 80, 50, 30, 18)
_DOLLARS: Final = (250, 150, 90, 50, 28)
_REQUESTS: Final = (18, 11, 7, 4, 3)


class RootKind(NamedTuple):
    """The resources that are limited under a root, each on all levels."""

    name: str
    resources: tuple[str, ...]
    gives_back: bool = True
    lenient: bool = False
    """Whether less may be given back than could be: buckets remember only so many headrooms."""
    forced: float = 0
    """The share of holds that are granted whatever is left."""


KINDS: Final = (
    RootKind("money", ("tokens", "usd", "slots"), forced=0.02),
    RootKind("rates", ("requests", "tokens", "slots"), gives_back=False),
    RootKind("mixed", ("requests", "usd", "slots"), lenient=True),
)
RESOURCES: Final = ("requests", "tokens", "usd", "slots")


def limit_on(resource: str, level: int) -> Limit:
    if resource == "slots":
        return parse(f"{_SLOTS[level]} in flight")
    if resource == "tokens":
        return parse(f"{_TOKENS[level]} per 2 seconds sliding")
    if resource == "usd":
        return parse(f"{_DOLLARS[level]} cents:0/calendar hour" if level < 2 else f"{_DOLLARS[level]} cents:0 in all")
    return parse(f"{_REQUESTS[level]}/second")


LIMITS: Final = {(resource, level): limit_on(resource, level) for resource in RESOURCES for level in range(LEVELS)}
METER: Final = Meter()


def declared_limits(starts_of_hours: Sequence[int]) -> list[Line]:
    """The limits as a history declares them."""
    found: list[Line] = [{"limit": "meter", "kind": "meter"}]
    for level in range(LEVELS):
        hours = {"periods": list(starts_of_hours)} if level < 2 else {}
        rate = {"capacity": _REQUESTS[level], "refill": _REQUESTS[level], "per": 1}
        found += [
            {"limit": f"slots{level}", "kind": "slots", "most": _SLOTS[level]},
            {"limit": f"tokens{level}", "kind": "window", "most": _TOKENS[level], "seconds": 2},
            {"limit": f"usd{level}", "kind": "budget", "amount": _DOLLARS[level], **hours},
            {"limit": f"requests{level}", "kind": "bucket", **rate},
        ]
    return found


def accounts_of(session: str) -> list[str]:
    """The paths of a session and of all above it."""
    names = session.split("/")
    return ["/".join(names[: level + 1]) for level in range(LEVELS)]


def kind_of(path: str) -> RootKind:
    return next(kind for kind in KINDS if path.startswith(kind.name))


def places(session: str) -> list[tuple[str, str]]:
    """What a hold of a session is counted under in a history: the limit's name, and the key."""
    kind = kind_of(session)
    meters = [("meter", f"{session}\t{resource}") for resource in kind.resources if resource != "slots"]
    limits = [(f"{name}{level}", path) for level, path in enumerate(accounts_of(session)) for name in kind.resources]
    return [*meters, *limits]


def asks_for(session: str, costs: Sequence[int]) -> list[Ask]:
    """The same for a store, after the ask to which the hold belongs."""
    root, asks = session.partition("/")[0], []
    for (name, key), cost in zip(places(session), costs, strict=True):
        if name == "meter":
            asks.append(Ask("usage", key, METER, cost, root))
        else:
            asks.append(Ask(name[:-1], key, LIMITS[name[:-1], int(name[-1])], cost, root))
    return [Ask("accounts", root, UNLIMITED, 1), *asks]


def resources_of(session: str) -> list[str]:
    """What each of these places counts."""
    return [key.rpartition("\t")[2] if name == "meter" else name[:-1] for name, key in places(session)]


class GrantedHold(NamedTuple):
    """A hold that was granted."""

    session: str
    hold_id: str
    costs: list[int]
    forced: bool

    @property
    def root(self) -> str:
        return self.session.partition("/")[0]


class AccountHolder(Holder):
    """Tasks on the accounts of one store."""

    async def work(self) -> None:
        while True:
            held = await self.hold(self.session(), f"{self._name}/{next(self._numbers)}")
            if held is not None:
                await self.use(held)
            await self.pause(0.02, 0.2)

    def session(self) -> str:
        chance, turn = self._chance, int(time.monotonic() / ROOT_SECONDS)
        root = f"{chance.choice(KINDS).name}-{turn}-{chance.randrange(ROOTS)}"
        return "/".join([root, *[f"{letter}{chance.randrange(2)}" for letter in "tgas"]])

    async def hold(self, session: str, hold_id: str) -> GrantedHold | None:
        """A hold, if it is granted. Now and then it is asked for twice."""
        chance, kind = self._chance, kind_of(session)
        held = GrantedHold(session, hold_id, self.costs(session, 0, 5), chance.random() < kind.forced)
        lease, release = chance.randint(LEASE // 3, LEASE), kind.gives_back and chance.random() < 0.3
        terms = HoldTerms(hold_id, lease, release, KEEP, note=session, shape=kind.name, forced=held.forced)
        line = {
            "verb": "hold", "key": held.root, "limits": places(session), "cost": held.costs,
            "hold": hold_id, "lease": lease, "release": release, "forced": held.forced,
        }  # fmt: skip
        said = ""
        for _ in range(2 if chance.random() < 0.1 else 1):
            said = await self.call(line, held, lambda: self._store.ahold(asks_for(session, held.costs), LOW, terms))
        return held if said == "passed" else None

    def costs(self, session: str, least: int, most: int) -> list[int]:
        """One for each resource; a request is always one, and so is a slot."""
        drawn = {name: self._chance.randint(least, most) for name in ("tokens", "usd")}
        return [drawn.get(resource, 1) for resource in resources_of(session)]

    async def use(self, held: GrantedHold) -> None:
        """Do something with a hold, and end it, or leave it behind."""
        chance, kind = self._chance, kind_of(held.session)
        await self.pause(0, 0.1)
        if chance.random() < 0.15:
            held = await self.extend(held)
            await self.pause(0, 0.1)
        fate = chance.random()
        if fate < 0.15:
            return  # abandoned
        if fate < 0.25:
            await asyncio.sleep(1.2 * LEASE / 1_000_000)  # until its lease has ended
        cancel = kind.gives_back and chance.random() < 0.2
        actual = [0] * len(held.costs) if cancel else self.actual(held, kind.gives_back)
        line: Line = {"verb": "cancel" if cancel else "settle", "key": held.root, "hold": held.hold_id}
        if not cancel:
            line["cost"] = actual
        for _ in range(2 if chance.random() < 0.15 else 1):
            await self.settle(line, held, [0 if cancel else 1, *actual], cancel)

    async def extend(self, held: GrantedHold) -> GrantedHold:
        """The hold, with more if it was granted."""
        lease, more = self._chance.randint(LEASE // 3, LEASE), self.costs(held.session, 0, 3)
        one = ("requests", "slots")
        more = [0 if resource in one else cost for resource, cost in zip(resources_of(held.session), more, strict=True)]
        total = [cost + added for cost, added in zip(held.costs, more, strict=True)]
        line = {"verb": "extend", "key": held.root, "hold": held.hold_id, "cost": more, "lease": lease}
        asks = asks_for(held.session, held.costs)
        said = await self.call(line, held, lambda: self._store.aextend(asks, LOW, held.hold_id, [1, *total], lease))
        return held._replace(costs=total) if said == "passed" else held

    def actual(self, held: GrantedHold, gives_back: bool) -> list[int]:
        """What a hold has really cost, by resource: less, the same, or a little more."""
        drawn: dict[str, int] = {}
        for resource, cost in zip(resources_of(held.session), held.costs, strict=True):
            least = 0 if gives_back and resource != "slots" else cost
            more = 2 if resource != "slots" and self._chance.random() < 0.1 else 0
            drawn.setdefault(resource, self._chance.randint(least, cost) + more)
        return [drawn[resource] for resource in resources_of(held.session)]

    async def settle(self, line: Line, held: GrantedHold, costs: list[int], cancel: bool = False) -> None:
        asks = asks_for(held.session, held.costs)
        await self.call(line, held, lambda: self._store.asettle(asks, LOW, held.hold_id, costs, cancel=cancel))

    async def adopt(self, line: Line) -> None:
        """By what the store knows of it."""
        known = await self._store.aread_hold("accounts", line["key"], line["hold"])
        if known is None:
            return
        assert known.shape == kind_of(known.note).name
        held = GrantedHold(known.note, known.hold_id, list(known.costs[1:]), False)
        costs = [cost + 1 for cost in held.costs]
        await self.settle({"verb": "settle", "key": held.root, "hold": held.hold_id, "cost": costs}, held, [1, *costs])

    async def call(self, line: Line, held: GrantedHold, verb: Callable[[], Awaitable[HoldAnswer]]) -> str:
        """Make a call and write it down: what was said, and where it was denied."""
        begun = self._record.begin(line)
        try:
            answer = await verb()
        except HoldError:
            self._record.end(begun, "refused")
            return "refused"
        assert not answer.decision.degraded
        if line["verb"] in ("settle", "cancel") or answer.decision or held.forced:
            self._record.end(begun, "passed")
            return "passed"
        assert answer.decision.bound is not None
        self._record.end(begun, "denied", bound=places(held.session)[answer.decision.bound - 1][0])
        return "denied"


if __name__ == "__main__":
    asyncio.run(run(AccountHolder, *sys.argv[1:]))
