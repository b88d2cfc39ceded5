"""Holds of a gate: an agent reserves on all accounts above it at once, and settles what it has used."""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from headgate._limiter_hot import KEEP
from headgate.errors import HoldError, UnknownHold, refuse
from headgate.events import AccountAlerted, HoldChecked
from headgate.flow import Flow, TwinCall, adrive, call_method, call_twin, drive
from headgate.gate._hot import EXEMPT
from headgate.gate.account_asks import HOLDS, AccountAsks, LimitRow, restored_asks
from headgate.gate.account_holds import (
    AccountAttempt,
    AccountHold,
    AccountHoldOwner,
    HoldContext,
    HoldTemplate,
    id_start,
    named_costs,
)
from headgate.gate.account_status import alert_share, has_recovered
from headgate.gate.accounts import NO_ACCOUNT, Bound, is_within, level_of
from headgate.gate.gate_changes import GateChanges
from headgate.gate.hold_templates import HoldRequest, HoldTemplates
from headgate.gate.policy import Policy, check_agent
from headgate.holds import PendingHold, check_id, found_hold
from headgate.limits.budget import Budget
from headgate.limits.decision import NEVER, Decision, Limit, Outcome, Violation
from headgate.limits.fixed import BLOCKED
from headgate.limits.numbers import Number, microseconds
from headgate.stores.base import Ask, Store
from headgate.stores.holds import (
    OPEN,
    AccountStore,
    HoldAnswer,
    ListedHold,
    shown_costs,
)
from headgate.wait_queue import WaitQueues
from headgate.workers import warn_of_workers

Costs: TypeAlias = Mapping[str, Any]
"""Costs by resource: whole numbers, or as many decimals as the unit has."""

_REMEMBERED: Final = 10_000  # alerts that were raised
_BLOCKED: Final = Decision(Outcome.DENY, BLOCKED, 0, NEVER, 0, -1)


class _AgentMoved(Exception):
    """While a hold waited, its agent moved to another account. It waits there from now on.

    If its id was given, it may have been made in the account before.
    """

    def __init__(self, request: HoldRequest, left: float | None) -> None:
        """`left`: seconds of its timeout."""
        super().__init__(request, left)
        self.request: Final = request
        self.left: Final = left


class GateHolds(GateChanges):
    """The holds of a gate, and the alerts that they raise."""

    private: bool

    def __init__(self, policy: Policy, store: Store, remember: object) -> None:
        self._hold_queues: Final = WaitQueues()
        self._templates: HoldTemplates | None = None
        # By budget, whatever its amount: the last share that was told, the period, and the budget as it was.
        self._alerted: dict[tuple[Bound, object], tuple[float, int, Budget]] = {}
        super().__init__(policy, store, remember)

    def hold(
        self,
        agent: str,
        costs: Costs,
        *,
        session: str | int | None = None,
        tool: str | None = None,
        lease: Number | None = None,
        timeout: Number | None = 0,
        hold_id: str | None = None,
        keep: Number = KEEP,
        max_age: Number | None = 3600,
    ) -> AccountHold:
        """Reserve costs on the agent, its session, and all accounts above it: everywhere, or nowhere.

        A hold also takes one request, and one slot of each account that limits them. A resource that is limited and not
        named costs nothing, and denies only while nothing is left of it. `hold.bound` tells what decided.

        Its lease is 60 seconds, or `accounts.max_lease` if that is less. See `Limiter.hold` for the other arguments.
        """
        request: HoldRequest = (agent, costs, session, tool, lease, hold_id, keep, max_age)
        while True:
            attempt = self._hold_templates().attempt(request)
            line = "" if attempt.is_asked_once(timeout) else self._line_of(attempt, request, timeout)
            before = drive(self._find_repeated(attempt), call_method) if attempt.may_be_elsewhere else None
            if before is not None:
                return before
            try:
                hold = attempt.run(self._hold_queues, line, timeout)
            except _AgentMoved as moved:
                request, timeout = moved.request, moved.left
                continue
            except HoldError as error:
                return drive(self._after_error(attempt, error), call_method)
            plain = hold and not attempt.repeated
            return self._decided(hold, None) if plain else drive(self._after_hold(attempt, hold), call_method)

    def ahold(
        self,
        agent: str,
        costs: Costs,
        *,
        session: str | int | None = None,
        tool: str | None = None,
        lease: Number | None = None,
        timeout: Number | None = 0,
        hold_id: str | None = None,
        keep: Number = KEEP,
        max_age: Number | None = 3600,
    ) -> PendingHold[AccountHold]:
        """`hold`, to be awaited, or used in `async with`."""

        async def make() -> AccountHold:
            request: HoldRequest = (agent, costs, session, tool, lease, hold_id, keep, max_age)
            left = timeout
            while True:
                attempt = self._hold_templates().attempt(request)
                line = "" if attempt.is_asked_once(left) else self._line_of(attempt, request, left)
                before = await adrive(self._find_repeated(attempt), call_twin) if attempt.may_be_elsewhere else None
                if before is not None:
                    return before
                try:
                    hold = await attempt.arun(self._hold_queues, line, left)
                except _AgentMoved as moved:
                    request, left = moved.request, moved.left
                    continue
                except HoldError as error:
                    return await adrive(self._after_error(attempt, error), call_twin)
                if hold and not attempt.repeated:
                    return self._decided(hold, None)
                return await adrive(self._after_hold(attempt, hold), call_twin)

        return PendingHold(make)

    def _line_of(self, attempt: AccountAttempt, request: HoldRequest, timeout: Number | None) -> str:
        """The line of an attempt, if it may wait. It is decided by the rules that are in effect when its turn comes."""
        agent, costs, session, tool, lease, given, keep, max_age = request
        hold_id, clock = attempt.hold_id.removeprefix(attempt.template.id_start), self._store.clock
        named = dict(costs)
        again = agent, named, session, tool, lease, hold_id, keep, max_age
        end = None if timeout is None else clock.now() + microseconds("timeout", timeout)

        def look_again() -> Decision | None:
            templates = self._hold_templates()
            if attempt.template.context is not templates.context:
                other = templates.attempt(again)
                if other.template.asks.path != attempt.template.asks.path:
                    left = None if end is None else max(end - clock.now(), 0) / 1_000_000
                    raise _AgentMoved((agent, named, session, tool, lease, given, keep, max_age), left)
                attempt.replace(other)
            return _BLOCKED if self._lookup.block_of(attempt.template.agent) is not None else None

        attempt.before_each_ask(look_again)
        return attempt.line if attempt.may_wait(timeout) else ""

    def _after_error(self, attempt: AccountAttempt, error: HoldError) -> Flow[TwinCall, AccountHold]:
        """The hold of the same id, if it is only the limits that have been others then."""
        before = None if attempt.own_id else (yield from self._find_repeated(attempt))
        if before is None:
            raise error
        return before

    def _after_hold(self, attempt: AccountAttempt, hold: AccountHold) -> Flow[TwinCall, AccountHold]:
        """A hold of the same id as it was made; or a denial, whose violation is recorded, if it is one.

        It is one by the agent's own level, by its session, or by a block.
        """
        if attempt.repeated:
            before = yield from self._find_repeated(attempt)
            if before is not None:
                return before
        bound, offence = hold.bound, attempt.template.offence
        violation: Violation | None = None
        own = hold.decision.limit is BLOCKED if bound is None else is_within(bound.account, hold.account)
        if not hold and offence is not None and own and not (hold.decision.degraded or attempt.kept_waiting):
            violation = yield TwinCall(self._store.record_violation, self._store.arecord_violation, (offence,))
        return self._decided(hold, violation)

    def _find_repeated(self, attempt: AccountAttempt) -> Flow[TwinCall, AccountHold | None]:
        """The hold with this id as it was made: perhaps under other limits, or in a former account."""
        template, asks = attempt.template, attempt.asks
        hold_id, costs = attempt.hold_id.removeprefix(template.id_start), [ask.cost for ask in asks]
        try:
            found = yield from self._find_hold(template.agent, hold_id)
        except UnknownHold:
            return None
        if found.state == OPEN and found.costs != named_costs(template.asks, costs):
            got = shown_costs(asks, costs)
            raise HoldError(f"hold {hold_id!r}: expected {found.shown_costs}, with which it is open, got {got}")
        self._decide_by_mode(found, template.mode)
        found.repeated = True
        return found

    def _decided(self, hold: AccountHold, violation: Violation | None) -> AccountHold:
        """The hold, with the decision that its caller gets. Emits the events of it."""
        if violation is not None:
            hold.decide(hold.decision.with_violation(violation))
        elif hold.mode != "enforced":
            self._decide_by_mode(hold, hold.mode)
        if violation is not None or self._listeners.get(HoldChecked):
            bound = hold.bound or Bound("", "", "")
            about = hold.decision, hold.costs, hold.session
            self._emit(HoldChecked(hold.agent, hold.tool, bound.account, bound.resource, *about))
            if violation is not None:
                self._emit_violation(hold.agent, "hold", bound.resource, violation)
        if self._listeners.get(AccountAlerted):  # asked here, too, since nearly all holds end here
            self._emit_alerts(hold)
        return hold

    def _decide_by_mode(self, hold: AccountHold, mode: str) -> None:
        """Let a hold of an agent that is never denied say so."""
        if mode == "shadow" and self._lookup.block_of(hold.agent) is None:
            hold.decide(hold.decision.as_shadow())
        elif mode == "exempt" and hold:
            hold.decide(EXEMPT)

    def _emit_alerts(self, hold: AccountHold) -> None:
        """Emit an event for each budget of an account that is used up, or nearly."""
        if not self._listeners.get(AccountAlerted):
            return
        for row, decision in hold.limits():
            budget = row.limit
            if isinstance(budget, Budget) and row.path and not decision.degraded:
                share = _used_share(budget, decision)
                if not (share or self._alerted) or budget not in self._limits_now(hold, row):
                    continue  # or it was changed since the hold was made
                if share:
                    self._emit_alert(hold.bound_of(row), budget, share, decision)
                elif has_recovered(decision.left, budget.amount):  # it is told again when it is used up once more
                    self._alerted.pop((hold.bound_of(row), budget.identity), None)

    def _limits_now(self, hold: AccountHold, row: LimitRow) -> tuple[Limit, ...]:
        """The limits that are in force where a hold has one; none if there are other levels since."""
        if level_of(hold.account) != self._lookup.effective.accounts.agent_level:
            return ()
        limits = self._lookup.effective.account_limits(row.path or f"{hold.account}/{NO_ACCOUNT}")
        limit = limits.get((hold.bound_of(row).resource, row.tool))
        return () if limit is None else limit.parts

    def _asks_now(self, hold: AccountHold, asks: tuple[Ask, ...]) -> tuple[Ask, ...]:
        """The asks of a hold, with the amounts of budgets that are in force: what is spent belongs to no amount."""
        found = list(asks)
        for place, row in enumerate(hold.rows, len(asks) - len(hold.rows)):
            if isinstance(row.limit, Budget):
                same = [one for one in self._limits_now(hold, row) if one.identity == row.limit.identity]
                found[place] = found[place].with_limit(same[0] if same else row.limit)
        return tuple(found)

    def _emit_alert(self, bound: Bound, budget: Budget, share: float, decision: Decision) -> None:
        # A calendar's periods end with whole seconds; the clock and the store aren't read at the same moment.
        resets_at = None if budget.period is None else float(round(self._store.clock.wall() + decision.reset_after))
        period = 0 if resets_at is None else round(resets_at / 60)
        key = (bound, budget.identity)
        known = self._alerted.get(key)
        if known is not None and known[1:] == (period, budget) and known[0] >= share:
            return
        if len(self._alerted) >= _REMEMBERED:
            self._alerted.clear()
        self._alerted[key] = (share, period, budget)
        self._emit(AccountAlerted(*bound, share, str(budget), resets_at, decision.left))

    def _hold_templates(self) -> HoldTemplates:
        """The maker of holds under the rules in effect."""
        found, lookup = self._templates, self._lookup
        if found is None or found.lookup is not lookup:
            if found is None and self.private:  # by now a server has started its workers
                warn_of_workers()
            store, most = self._account_store, lookup.effective.accounts.max_lease
            context = HoldContext(store, lookup.low, self._wake_lines, self._emit_alerts, self._asks_now, most)
            found = HoldTemplates(lookup, context)
            self._templates = found
        return found

    def _wake_lines(self, asks: AccountAsks) -> None:
        for group in asks.groups:
            self._hold_queues.wake_group(group)

    @property
    def _account_store(self) -> AccountStore:
        if not isinstance(self._store, AccountStore):
            refuse("Gate.hold", "a store with accounts (headgate.stores.holds.AccountStore)", self._store)
        return self._store

    # By id -----------------------------------------------------------------------------------------------------------

    def find_hold(self, agent: str, hold_id: str) -> AccountHold:
        """A hold of an agent that was made before, perhaps by another process; raises `UnknownHold`."""
        return drive(self._find_hold(agent, hold_id), call_method)

    async def afind_hold(self, agent: str, hold_id: str) -> AccountHold:
        return await adrive(self._find_hold(agent, hold_id), call_twin)

    def _find_hold(self, agent: object, hold_id: object) -> Flow[TwinCall, AccountHold]:
        name, store, effective = check_agent(agent), self._account_store, self._lookup.effective
        store_id = id_start(name) + check_id(hold_id)
        for root in effective.hold_roots(name):
            listed: ListedHold | None = yield TwinCall(store.read_hold, store.aread_hold, (HOLDS, root, store_id))
            if listed is not None:
                (asks, session), context = restored_asks(root, listed), self._hold_templates().context
                template = HoldTemplate(context, name, asks, "enforced", None, blocked=False, moved=False)
                made, called = asks.asks(asks.by_resource(listed.costs), session), self._store.clock.now()
                answer: HoldAnswer = yield TwinCall(
                    store.find_hold, store.afind_hold, (made, self._lookup.low, store_id)
                )
                owner = AccountHoldOwner(template, session)
                return found_hold(owner, made, store_id, answer, called, make=AccountHold)
        raise UnknownHold(name, str(hold_id))


def _used_share(budget: Budget, decision: Decision) -> float:
    """The share of a budget that is used, as `alert_share` has it; 1 rather than 0.8 if it also denies.

    A denial alone says nothing: a cost that is too large is denied of a full budget, too.
    """
    if decision.remaining * 5 > budget.capacity + 1:  # whole units are quick, and rule most budgets out
        return 0.0
    share = alert_share(decision.left, budget.amount)
    return 1.0 if share and not decision else share
