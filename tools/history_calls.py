"""The calls of a history, one for each line. For tools/check_history.py, which says what they look like."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tools.history_accounts import Limit

VERBS: Final = ("check", "hold", "extend", "settle", "cancel", "find", "charge", "refund", "peek", "usage")
ON_HOLDS: Final = ("hold", "extend", "settle", "cancel", "find")
LOOKS: Final = ("peek", "usage")
STATES: Final = ("open", "expired", "settled", "cancelled")
UNKNOWN: Final = ("error", None)

Account = tuple[str, str]  # limit, key


class NoHistory(ValueError):
    """A line that can't be read: where, what was expected, what came."""


@dataclass(slots=True)
class Call:
    """One line; `first` and `last` are the bounds of its instant, in the order of all instants."""

    line: str
    verb: str
    key: str
    accounts: tuple[Account, ...]
    costs: tuple[int, ...]
    hold: str
    lease: int | None
    release: bool
    called: int
    returned: int | None
    said: str | None
    retry: int | None
    shown: int  # what a peek has left, or usage has counted
    forced: bool = False
    state: str | None = None
    first: int = 0
    last: int = 0


def read_call(line: str, record: Mapping[str, Any], limits: Mapping[str, Limit]) -> Call:
    verb, key, said = record["verb"], record.get("key", ""), record.get("said")
    named = record.get("limits") or ()
    accounts = tuple([(one, key) if isinstance(one, str) else (one[0], one[1]) for one in named])
    cost = record["cost"] if verb == "settle" else record.get("cost", 0 if verb == "extend" else 1)
    costs = tuple(cost) if isinstance(cost, list | tuple) else (cost,) * max(len(accounts), 1)
    call = Call(
        line, verb, key, accounts, costs, str(record["hold"]) if verb in ON_HOLDS else "", record.get("lease"),
        bool(record.get("release")), record["called"], record["returned"], said, record.get("retry"),
        record["remaining" if verb == "peek" else "counted"] if verb in LOOKS and said in ("passed", "denied") else 0,
        bool(record.get("forced")), record["state"] if verb == "find" and said == "passed" else None,
    )  # fmt: skip
    numbers = (
        *costs,
        call.called,
        call.shown,
        *[n for n in (call.lease, call.returned, call.retry) if n is not None],
    )
    wrong = (
        f"a verb of {', '.join(VERBS)}" if verb not in VERBS
        else "passed, denied, refused, error or null as `said`" if said not in ("passed", "denied", "refused", *UNKNOWN)
        else "limits declared before" if not all([name in limits for name, _ in accounts])
        else "limits" if not accounts and verb not in ON_HOLDS[1:]
        else "a cost for each limit" if accounts and len(costs) != len(accounts)
        else "a meter" if verb == "usage" and limits[accounts[0][0]].kind != "meter"
        else "a lease" if verb == "hold" and call.lease is None
        else f"a state of {', '.join(STATES)}" if call.state is not None and call.state not in STATES
        else "whole numbers" if not all([type(number) is int for number in numbers])
        else "costs from 0" if min(costs) < 0
        else "`returned`, as it is known what was said" if call.returned is None and said not in UNKNOWN
        else "`returned` from `called` on" if call.returned is not None and call.returned < call.called
        else ""
    )  # fmt: skip
    if wrong:
        raise NoHistory(f"line {line}: expected {wrong}, got {dict(record)}")
    return call


def spread(costs: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Costs for so many limits, where one may stand for all."""
    return costs * count if len(costs) == 1 else costs
