"""Holds of accounts: the handle of one, and what makes it."""

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

from headgate._hold_hot import Hold
from headgate.errors import RateLimited, refuse
from headgate.gate.account_asks import AccountAsks, LimitRow
from headgate.gate.accounts import Bound, join_path, limit_text
from headgate.hold_attempt import HoldAttempt
from headgate.limits.budget import Budget
from headgate.limits.decision import NEVER, Decision
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import rate_of
from headgate.limits.units import in_units
from headgate.stores.base import Ask, Offence
from headgate.stores.holds import HoldAnswer, HoldStore, HoldTerms, shown_costs


class HoldContext(NamedTuple):
    """The parts of a gate that its holds need."""

    hold_store: HoldStore
    low: int
    freed: Callable[[AccountAsks], object]
    """Called with the asks of a hold that may have given something back."""
    emit_alerts: Callable[["AccountHold"], object]
    """Called after each verb."""
    asks_now: Callable[["AccountHold", tuple[Ask, ...]], tuple[Ask, ...]]
    """The asks of a hold, with the budgets that are in force."""
    max_lease: float
    """The longest lease, in seconds."""


class HoldTemplate:
    """The common part of an agent's holds with one tool and the same resources."""

    def __init__(
        self,
        context: HoldContext,
        agent: str,
        asks: AccountAsks,
        mode: str,
        offence: Offence | None,
        blocked: bool,
        moved: bool,
    ) -> None:
        self.context: Final = context
        self.agent: Final = agent
        self.asks: Final = asks
        self.mode: Final = mode
        """ "enforced"; or "exempt" or "shadow": never denied."""
        self.offence: Final = offence
        """The offence that its denials are recorded as; None if nothing is enforced."""
        enforced = offence is not None and offence.backoff.enforce
        self.enforced_offence: Final = offence if enforced else None
        """The same, if the advised wait is enforced."""
        self.blocked: Final = blocked
        """Whether the agent is blocked: perhaps only until some time."""
        self.moved: Final = moved
        """Whether the agent has belonged to another account before."""
        self.id_start: Final = id_start(agent)


def id_start(agent: str) -> str:
    """The beginning of the ids of an agent's holds, among those of all agents of its top account."""
    return f"{join_path([agent])}/"


class AccountHoldOwner:
    """The `HoldOwner` of the holds of an agent and one session of it, or none."""

    def __init__(self, template: HoldTemplate, session: str) -> None:
        self.template: Final = template
        self.session: Final = session
        self.hold_store: Final = template.context.hold_store
        self.low: Final = template.context.low

    def read_costs(self, cost: object, unnamed: Sequence[Any], *, spent: bool = False) -> tuple[Any, ...]:
        asks = self.template.asks
        return asks.by_ask(asks.costs_of(cost, asks.by_resource(unnamed), spent=spent))

    def denial(self, key: str, decision: Decision) -> RateLimited:
        asks, bound = self.template.asks, None
        what = "hold" if decision.limit is UNLIMITED else str(decision.limit)  # while the store was away
        if decision.bound is not None:
            row = asks.rows[decision.bound]
            bound = asks.bound_of(row, self.session)
            what = f"{limit_text(bound.resource, row.limit, asks.resources[row.resource][1])} ({bound})"
        rate, retry_ms = rate_of(decision.limit), decision.retry_ms
        return RateLimited(self.template.agent, rate, what, retry_ms, degraded=decision.degraded, bound=bound)

    def freed(self, key: str) -> None:
        self.template.context.freed(self.template.asks)


class AccountHold(Hold):
    """A reservation of an agent on all accounts above it, until it is settled or cancelled, or its lease ends.

    Costs are mappings of resources. It is used like the `Hold` of a limiter.

    >>> from headgate import Gate, Policy
    >>> gate = Gate(Policy(accounts={"default": {"agent": {"tokens": "100000/calendar day", "slots": "5 in flight"}}}))
    >>> hold = gate.hold("planner", {"tokens": 1200})
    >>> bool(hold), hold.state
    (True, 'open')
    >>> _ = hold.settle({"tokens": 830})
    >>> [(one.resource, str(one.left)) for one in gate.explain("planner")]
    [('slots', '5'), ('tokens', '99170')]
    """

    def __init__(
        self,
        owner: AccountHoldOwner,
        asks: tuple[Ask, ...],
        hold_id: str,
        lease: int,
        answer: HoldAnswer,
        called: int,
        max_age: int | None = None,
    ) -> None:
        super().__init__(owner, asks, hold_id, lease, answer, called, max_age)
        self._template: Final = owner.template
        self.session: Final = owner.session
        self._final: Decision | None = None  # that replaces the decision of the limits
        self.repeated = False
        """Whether it was made before, with the same id."""

    @property
    def agent(self) -> str:
        return self._template.agent

    @property
    def id(self) -> str:
        """The id, by which another process can settle it: `gate.find_hold(agent, id)`."""
        return self._id.partition("/")[2]

    @property
    def account(self) -> str:
        """The path of the agent when the hold was made."""
        return self._template.asks.path

    @property
    def tool(self) -> str:
        return self._template.asks.tool

    @property
    def costs(self) -> dict[str, Decimal]:
        """The reserved or settled costs, by resource."""
        return named_costs(self._template.asks, self._costs)

    def missing_to(self, total: object) -> dict[str, Decimal]:
        """The costs to add, by resource, so that so much is reserved in all."""
        asks = self._template.asks
        reserved = asks.by_resource(self._costs)
        found = zip(asks.resources, asks.costs_of(total, reserved), reserved, strict=True)
        return {name: in_units(cost - own, decimals) for (name, decimals), cost, own in found if cost > own}

    @property
    def shown_costs(self) -> str:
        """The same as a text."""
        return shown_costs(self._asks, self._costs)

    @property
    def bound(self) -> Bound | None:
        """The account, resource and tool that decided: the longest wait, or else the smallest share left.

        None if nothing is limited, or something other than a limit decided.
        """
        found = self._binding()
        return None if found is None else self.bound_of(self._template.asks.rows[found])

    @property
    def rows(self) -> list[LimitRow]:
        """Its limits."""
        return self._template.asks.rows

    def bound_of(self, row: LimitRow) -> Bound:
        return self._template.asks.bound_of(row, self.session)

    @property
    def mode(self) -> str:
        return self._template.mode

    @property
    def decision(self) -> Decision:
        if self._final is not None:
            return self._final
        found = self._binding()
        return self._decision.at(-1) if found is None else self._decided(found)

    def decide(self, decision: Decision) -> None:
        """Let it be decided otherwise: with a violation, in shadow mode, or for an exempt agent."""
        self._final = decision

    def _arguments(self) -> tuple[tuple[Ask, ...], int, str]:
        asks, low, _ = super()._arguments()
        return asks, low, self._id

    def _extension_arguments(self) -> tuple[tuple[Ask, ...], int, str]:
        asks, low, hold_id = self._arguments()
        return self._template.context.asks_now(self, asks), low, hold_id

    def _extension(self, cost: object, lease: object) -> tuple[tuple[int, ...] | None, int | None]:
        costs, span = super()._extension(cost, lease)
        check_lease(span, lease, self._template.context.max_lease)
        return costs, span

    def _ended(self, answer: HoldAnswer) -> Decision:
        super()._ended(answer)
        return self._after_verb()

    def _extended(self, called: int, answer: HoldAnswer) -> Decision:
        super()._extended(called, answer)
        return self._after_verb()

    def _after_verb(self) -> Decision:
        self._final = None
        self._template.context.emit_alerts(self)
        return self.decision

    def _binding(self) -> int | None:
        """The place of the limit that decided."""
        parts, first = self._parts, self._template.asks.first_limit
        if not parts:  # the store is away
            place = self._decision.bound
            return None if place is None or place < first else place - first
        if len(parts) <= first:
            return None
        found, share = first, share_left(parts[first])
        for place in range(first + 1, len(parts)):
            one = share_left(parts[place])
            if _binds_more(parts[place], one, parts[found], share):
                found, share = place, one
        return found - first

    def limits(self) -> list[tuple[LimitRow, Decision]]:
        """Each limit with the decision on it; none while the store is away."""
        return self._template.asks.limits(self._parts) if self._parts else []

    def _decided(self, place: int) -> Decision:
        asks = self._template.asks
        row, one = asks.rows[place], self._parts[asks.first_limit + place] if self._parts else self._decision
        decimals = asks.resources[row.resource][1]
        if decimals == 0 or isinstance(row.limit, Budget):
            return one.at(place)
        retry = one.retry_us
        reset = round(one.reset_after * 1_000_000)
        remaining = one.remaining // 10**decimals
        return Decision(one.outcome, row.limit, remaining, NEVER if retry is None else retry, reset, place)

    def __repr__(self) -> str:
        return f"AccountHold({self.id!r} of {self.agent!r}, {self.state})"


class AccountAttempt(HoldAttempt[AccountHold]):
    """One attempt at a hold of an agent."""

    def __init__(
        self, owner: AccountHoldOwner, asks: tuple[Ask, ...], terms: HoldTerms, max_age: object, own_id: bool
    ) -> None:
        super().__init__(owner, asks, terms, max_age, own_id=own_id)
        self.owner = owner
        self.template = owner.template
        self.offence = owner.template.enforced_offence
        self._look_again: Callable[[], Decision | None] | None = None

    @property
    def line(self) -> str:
        """The line in which it waits: one for each session and tool, since other limits bind the others."""
        return f"{self.template.asks.path}\n{self.template.asks.note(self.owner.session)}"

    @property
    def groups(self) -> tuple[str, ...]:
        return self.template.asks.groups

    def is_asked_once(self, timeout: object) -> bool:
        """Whether it is decided at once, by the rules that it was made under."""
        return not self.may_wait(timeout) and not self.template.blocked

    def before_each_ask(self, look_again: Callable[[], Decision | None]) -> None:
        """Look at the rules before each ask: while it waits, they may change. A decision denies it."""
        self._look_again = look_again

    def replace(self, other: "AccountAttempt") -> None:
        """Ask for the same under other rules, which another attempt was made by."""
        self._owner = self.owner = other.owner
        self.template, self.offence = other.template, other.offence
        self.asks, self._terms = other.asks, other._terms

    def _made(self, answer: HoldAnswer, terms: HoldTerms) -> AccountHold:
        return AccountHold(self.owner, self.asks, terms.hold_id, terms.lease, answer, self._called, self._max_age)

    def _begin(self) -> Decision | None:
        super()._begin()
        return None if self._look_again is None else self._look_again()

    @property
    def may_be_elsewhere(self) -> bool:
        """Whether a hold of the same id may have been made in an account to which the agent has belonged."""
        return self.template.moved and not self.own_id


def _binds_more(one: Decision, share: float, other: Decision, other_share: float) -> bool:
    """Whether one of two decisions comes first: denials do, the longest wait before others, then the smallest share."""
    if bool(one) is not bool(other):
        return not one
    wait, other_wait = one.retry_us, other.retry_us
    if wait != other_wait:
        return wait is None or (other_wait is not None and wait > other_wait)
    return share < other_share


def share_left(decision: Decision) -> float:
    limit = decision.limit
    (capacity,) = limit.integers() if isinstance(limit, Budget) else (limit.capacity,)
    return decision.smallest_left / capacity if capacity else 0.0


def check_lease(span: int | None, lease: object, most: float) -> None:
    """Refuse a lease, given with its microseconds, that is longer than the policy allows."""
    if span is not None and span > most * 1_000_000:
        refuse("hold lease", f"at most {most:g} seconds (accounts.max_lease)", lease)


def named_costs(asks: AccountAsks, costs: Sequence[int]) -> dict[str, Decimal]:
    """Costs of asks by resource, in units."""
    found = zip(asks.resources, asks.by_resource(costs), strict=True)
    return {name: in_units(cost, decimals) for (name, decimals), cost in found if cost}
