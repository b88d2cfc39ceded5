"""The asks of a hold: every limit of every account above an agent, and meters of its usage."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from headgate.errors import HoldError, refuse
from headgate.gate.accounts import (
    MAX_ACCOUNT,
    NO_ACCOUNT,
    REQUESTS,
    SLOTS,
    AccountLimit,
    Accounts,
    Bound,
    LimitKey,
    is_name,
    level_of,
    path_prefixes,
    plain_name,
    session_path,
)
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.meter import Meter
from headgate.limits.notation import parse
from headgate.limits.numbers import LARGEST, cost_in, spent_in
from headgate.limits.units import BUILT_IN
from headgate.stores.base import Ask
from headgate.stores.holds import ListedHold

HOLDS: Final = "acct"
"""The name under which stores keep the holds of accounts: short, since it is in the key of each."""
USAGE: Final = "usage"
"""The name under which they count what is used."""
_SESSION: Final = -1  # the level of sessions, whose keys differ from hold to hold


class LimitRow(NamedTuple):
    """One limit that a hold asks for."""

    path: str
    """Of the account; "" for the session's."""
    resource: int
    """Its place among the resources."""
    tool: str
    limit: Limit


class AccountAsks:
    """The limits for holds of one agent, with one tool and the same resources.

    `text` is what is common to many holds: together with the note of a hold it makes the same asks again, also if the
    limits have changed since.
    """

    def __init__(
        self,
        path: str,
        root: str,
        tool: str,
        resources: Sequence[tuple[str, int]],
        metered: int,
        zone: str,
        rows: list[LimitRow],
    ) -> None:
        self.path: Final = path
        """Of the agent."""
        self.root: Final = root
        """The top account, which chooses the slot of a cluster."""
        self.groups: Final = (root,) if root == path else (root, path)
        """The groups of waiters for the same accounts: below the top account, and of the agent."""
        self.tool: Final = tool
        self.resources: Final = tuple(resources)
        """Their names and decimals. The first ones are metered."""
        self.rows: Final = rows
        # The path without the root and the name of the agent; "" if the path is the root.
        self._between: Final = path[len(root) : path.rindex("/") + 1] if path != root else ""
        # The asks, without costs. The key of one for the session is "".
        self._asks: Final[list[Ask]] = [Ask(HOLDS, root, UNLIMITED, 0)]
        for name, decimals in resources[:metered]:
            key = f"{path}\t{tool}\t{metered_unit(name, decimals)}"
            self._asks.append(Ask(USAGE, key, _meter(zone, name, decimals), 0, root))
        self.first_limit: Final = len(self._asks)
        """The place of the first limit among the asks. Those before it count holds and usage."""
        for row in rows:
            self._asks.append(Ask(_limit_name(resources[row.resource][0], row.tool), row.path, row.limit, 0, root))
        self.places: Final[tuple[int, ...]] = (0, *range(metered), *[row.resource for row in rows])
        """For each ask the place of its resource."""
        self._places: Final = {name: (place, decimals) for place, (name, decimals) in enumerate(resources)}
        self._one_request: Final = tuple([int(name == REQUESTS) for name, _ in resources])
        shape = [[level_of(row.path) if row.path else _SESSION, row.resource, row.tool, str(row.limit)] for row in rows]
        known = {"resources": self.resources, "metered": metered, "zone": zone, "limits": shape}
        self.text: Final = json.dumps(known, separators=(",", ":"), ensure_ascii=False)
        # The last session and its path, since the next hold is often in the same one. One object (mypyc would keep a
        # tuple[str, str] as two fields), so that no thread sees half of another's.
        self._last_session: tuple[str, ...] = ("", "")

    def asks(self, costs: Sequence[int], session: str) -> tuple[Ask, ...]:
        """The asks for costs of the resources."""
        of_session = self._path_of(session)
        made: list[Ask] = []
        for i in range(len(self._asks)):
            ask = self._asks[i]
            made.append(Ask(ask.name, ask.key or of_session, ask.limit, costs[self.places[i]], ask.root))
        return tuple(made)

    def _path_of(self, session: str) -> str:
        last = self._last_session
        if last[0] != session:
            last = (session, session_path(self.path, session))
            self._last_session = last
        return last[1]

    def session_id(self, session: object) -> str:
        """`check_session`, quickly for the session of the last hold."""
        return session if type(session) is str and session == self._last_session[0] != "" else check_session(session)

    def note(self, session: str) -> str:
        """The note of a hold, to make its asks again: all that neither its key nor its id tells."""
        return f"{self._between}\t{self.tool}\t{session}"

    def costs_of(self, given: object, unnamed: Sequence[Any] | None = None, *, spent: bool = False) -> tuple[Any, ...]:
        """Costs of the resources in smallest units. Those that aren't named cost what `unnamed` says, or nothing.

        A new hold, for which `unnamed` is None, makes one request. What is `spent` already may be a Fraction.
        """
        if type(given) is not dict and not isinstance(given, Mapping):
            expected = 'costs by resource, such as {"tokens": 1200}'
            refuse("cost", expected, given)
        costs: list[Any] = list(self._one_request if unnamed is None else unnamed)
        places = self._places
        for resource, cost in given.items():
            name: str = resource if type(resource) is str else plain_name(resource)
            if name == SLOTS:
                refuse("cost", "no slots: a hold takes one of each account that limits them", name)
            if name not in places:
                known = ", ".join([one for one in places if one != SLOTS])
                refuse("cost", f"the resources of the hold ({known})", resource)
            place, decimals = places[name]
            if not decimals and type(cost) is int and 0 < cost <= LARGEST:  # as most are
                costs[place] = cost
                continue
            try:
                zero = unnamed is not None or name != REQUESTS
                costs[place] = spent_in(decimals, cost) if spent else cost_in(decimals, cost, zero=zero)
            except ValueError as error:
                refuse(f"cost of {name}", str(error).partition("expected ")[2].partition(", got")[0], cost)
            if costs[place] > LARGEST:
                refuse(f"cost of {name}", f"at most {LARGEST}", cost)
        return tuple(costs)

    def by_ask(self, costs: Sequence[Any]) -> tuple[Any, ...]:
        """Costs of the resources as costs of the asks."""
        return tuple([costs[place] for place in self.places])

    def by_resource(self, costs: Sequence[Any]) -> tuple[Any, ...]:
        """Costs of the asks as costs of the resources."""
        found: list[Any] = [0] * len(self.resources)
        for i in range(len(costs)):
            found[self.places[i]] = costs[i]
        return tuple(found)

    def limits(self, parts: Sequence[Decision]) -> list[tuple[LimitRow, Decision]]:
        """The limits, each with its decision, from the decisions on all asks."""
        return list(zip(self.rows, parts[self.first_limit :], strict=True))

    def bound_of(self, row: LimitRow, session: str) -> Bound:
        path = row.path or session_path(self.path, session)
        return Bound(path, self.resources[row.resource][0], row.tool)


def _limit_name(resource: str, tool: str) -> str:
    """The name under which stores count a limit of a resource, for all tools or for one."""
    return f"account:{resource}:{tool}" if tool else f"account:{resource}"


def metered_unit(resource: str, decimals: int) -> str:
    """A resource as usage names it. An own unit has its decimals there, which another policy may change."""
    return resource if resource in BUILT_IN or resource == REQUESTS else f"{resource}:{decimals}"


def read_metered_unit(text: str) -> tuple[str, int]:
    """The resource, and its decimals."""
    name, _, decimals = text.partition(":")
    return name, int(decimals) if decimals else BUILT_IN.get(name, 0)


def account_asks(
    accounts: Accounts, path: str, plan: str, tool: str, named: Sequence[str], sessions: bool
) -> AccountAsks:
    """The asks for a hold of an agent. `named` are the resources that it names."""
    above = [one for one in path_prefixes(path)[:-1] if one.rpartition("/")[2] != NO_ACCOUNT]
    found = [*[(one, accounts.limits_of(one)) for one in above], (path, accounts.limits_of(path, plan))]
    if sessions:
        found.append(("", accounts.limits_of(f"{path}/{NO_ACCOUNT}")))
    return _made(accounts, path, tool, named, found, ("", tool))


def asks_of_one(accounts: Accounts, path: str, plan: str) -> AccountAsks:
    """All limits of one account, those of tools included."""
    return _made(accounts, path, "", (), [(path, accounts.limits_of(path, plan))], ("", *accounts.tools))


def _made(
    accounts: Accounts,
    path: str,
    tool: str,
    named: Sequence[str],
    limits: Sequence[tuple[str, Mapping[LimitKey, AccountLimit]]],
    tools: Sequence[str],
) -> AccountAsks:
    limited = {resource for _, found in limits for resource, of in found if of in tools}
    # What is limited can be settled without having been named, so it is metered as well.
    counted = {*named, *limited} - {REQUESTS, SLOTS}
    metered = [REQUESTS, *[name for name in accounts.units if name in counted]]
    others = [name for name in accounts.units if name in limited and name not in metered]
    resources = [(name, accounts.units[name]) for name in [*metered, *others]]
    place = {name: i for i, (name, _) in enumerate(resources)}
    rows = [
        LimitRow(account, place[resource], of, part)
        for account, found in limits
        for (resource, of), limit in sorted(found.items())
        if of in tools
        for part in limit.parts
    ]
    return AccountAsks(path, accounts.root_of(path), tool, resources, len(metered), accounts.zone, rows)


def restored_asks(root: str, listed: ListedHold) -> tuple[AccountAsks, str]:
    """The asks of a hold that was made before under a top account, and its session."""
    try:
        between, tool, session = listed.note.split("\t")
        path = f"{root}{between}{listed.hold_id.partition('/')[0]}" if between else root
        return _restored(path, root, tool, listed.shape), session
    except (ValueError, LookupError, TypeError) as error:
        raise HoldError(f"hold: expected one of an account, got one with the note {listed.note!r}") from error


@lru_cache(4096)
def _restored(path: str, root: str, tool: str, shape: str) -> AccountAsks:
    known: dict[str, Any] = json.loads(shape)
    prefixes = path_prefixes(path)
    rows = [
        LimitRow("" if level == _SESSION else prefixes[level], resource, of, parse(text))
        for level, resource, of, text in known["limits"]
    ]
    resources = [(str(name), int(decimals)) for name, decimals in known["resources"]]
    return AccountAsks(path, root, tool, resources, int(known["metered"]), str(known["zone"]), rows)


def check_session(session: object) -> str:
    """The id of a session, "" for none."""
    if session is None:
        return ""
    text = session
    if isinstance(session, int) and not isinstance(session, bool) and session.bit_length() <= 4 * MAX_ACCOUNT:
        text = str(session)  # of more digits Python may refuse it
    if not is_name(text):
        refuse("session", f"1 to {MAX_ACCOUNT} printable characters, or None for no session", session)
    return plain_name(text)


@lru_cache(1024)
def _meter(zone: str, unit: str, decimals: int) -> Meter:
    return Meter(zone, unit, decimals)
