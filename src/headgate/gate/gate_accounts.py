"""Accounts of a gate: their limits and what is left of them, what they have used, and changes to them."""

from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta, tzinfo
from decimal import Decimal
from functools import lru_cache
from typing import Final

from headgate.errors import refuse
from headgate.flow import Flow, TwinCall, adrive, call_method, call_twin, drive, in_thread
from headgate.gate import changes
from headgate.gate.account_asks import (
    HOLDS,
    USAGE,
    AccountAsks,
    asks_of_one,
    check_session,
    read_metered_unit,
    restored_asks,
)
from headgate.gate.account_holds import named_costs
from headgate.gate.account_status import AccountHoldSummary, AccountStatus, LimitStatus, limit_status
from headgate.gate.accounts import (
    NO_ACCOUNT,
    SLOTS,
    Bound,
    is_name,
    is_within,
    level_of,
    path_prefixes,
    session_path,
    split_path,
)
from headgate.gate.gate_holds import GateHolds
from headgate.gate.policy import check_agent
from headgate.gate.usage import DEFAULT_GROUPS, Usage, UsageTotal, usage_groups, usage_totals
from headgate.limits.budget import Budget
from headgate.limits.calendar import Calendar, zone_of
from headgate.limits.decision import Decision
from headgate.limits.meter import KEPT
from headgate.limits.notation import LimitLike
from headgate.limits.numbers import whole
from headgate.limits.units import in_units
from headgate.stores.base import Ask
from headgate.stores.holds import EXPIRED, OPEN, ListedHold, UsageRow

_widest: Final = lru_cache(4096)(Budget.widest)  # a budget is made of texts

_LISTED: Final = 10_000  # open holds that are looked at to list some
_COUNTED: Final = 1000  # the same to tell what is held


class GateAccounts(GateHolds):
    """The accounts of a gate: reading and changing them."""

    def explain(self, agent: str, *, session: str | int | None = None, tool: str | None = None) -> list[LimitStatus]:
        """Every limit that a hold of an agent would meet, with what is left of it."""
        return drive(self._explain(agent, session, tool), call_method)

    async def aexplain(
        self, agent: str, *, session: str | int | None = None, tool: str | None = None
    ) -> list[LimitStatus]:
        return await adrive(self._explain(agent, session, tool), call_twin)

    def _explain(self, agent: object, session: object, tool: object) -> Flow[TwinCall, list[LimitStatus]]:
        owner, costs = self._hold_templates().owner(agent, {}, session, tool)
        asks = owner.template.asks
        return (yield from self._status(asks, asks.asks(costs, owner.session), owner.session))

    def account(self, path: str) -> AccountStatus:
        """An account, an agent or a session by its path, with all its limits and what is left of them."""
        return drive(self._read_account(path), call_method)

    async def aaccount(self, path: str) -> AccountStatus:
        return await adrive(self._read_account(path), call_twin)

    def accounts(self, paths: Iterable[str]) -> list[AccountStatus]:
        """Several accounts. The open holds of each top account are read once."""
        return drive(self._read_accounts(paths), call_method)

    async def aaccounts(self, paths: Iterable[str]) -> list[AccountStatus]:
        return await adrive(self._read_accounts(paths), call_twin)

    def _read_accounts(self, paths: Iterable[str]) -> Flow[TwinCall, list[AccountStatus]]:
        if isinstance(paths, str) or not isinstance(paths, Iterable):
            refuse("accounts", "paths of accounts, such as ['acme', 'acme/search']", paths)
        held: dict[str, dict[Bound, int]] = {}
        found = []
        for path in paths:
            status = yield from self._read_account(path, held)
            found.append(status)
        return found

    def _read_account(
        self, path: object, held: dict[str, dict[Bound, int]] | None = None
    ) -> Flow[TwinCall, AccountStatus]:
        effective = self._lookup.effective
        accounts = effective.accounts
        found = accounts.check_path("account", path, sessions=True)
        level = level_of(found)
        plan = accounts.rules_of(found).plan
        if level == accounts.agent_level:
            plan = effective.rules_of(split_path(found)[-1]).plan
        asks = asks_of_one(accounts, found, plan)
        limits = yield from self._status(asks, asks.asks(asks.costs_of({}), ""), "", held)
        return AccountStatus(found, accounts.levels[level], plan, tuple(limits))

    def _status(
        self,
        asks: AccountAsks,
        made: tuple[Ask, ...],
        session: str,
        known: dict[str, dict[Bound, int]] | None = None,
    ) -> Flow[TwinCall, list[LimitStatus]]:
        """The limits of some asks. `known` is what is held, by top account, and gets what is read here."""
        store, accounts = self._account_store, self._lookup.effective.accounts
        peeked = list(made)
        for place, row in enumerate(asks.rows, asks.first_limit):
            if isinstance(row.limit, Budget):
                peeked[place] = peeked[place].with_limit(_widest(row.limit))
        parts: tuple[Decision, ...] = yield TwinCall(store.peek_each, store.apeek_each, (peeked, self._lookup.low))
        held = None if known is None else known.get(asks.root)
        if held is None:
            arguments = (HOLDS, asks.root, _COUNTED)
            listed: list[ListedHold] = yield TwinCall(store.list_holds, store.alist_holds, arguments)
            held = _held(asks.root, listed)
            if known is not None:
                known[asks.root] = held
        return [
            limit_status(
                bound := asks.bound_of(row, session),
                accounts.levels[level_of(bound.account)],
                row.limit,
                asks.resources[row.resource][1],
                decision,
                held,
            )
            for row, decision in asks.limits(parts)
        ]

    def list_holds(self, path: str, count: int = 100) -> list[AccountHoldSummary]:
        """Holds of an account and everything below it: the open ones, then the expired ones, each by their ends."""
        found, root, most = self._check_listing(path, count)
        return _summaries(root, self._account_store.list_holds(HOLDS, root, _LISTED), found, most)

    async def alist_holds(self, path: str, count: int = 100) -> list[AccountHoldSummary]:
        found, root, most = self._check_listing(path, count)
        return _summaries(root, await self._account_store.alist_holds(HOLDS, root, _LISTED), found, most)

    def _check_listing(self, path: object, count: object) -> tuple[str, str, int]:
        accounts = self._lookup.effective.accounts
        found = accounts.check_path("account", path, sessions=True)
        return found, accounts.root_of(found), whole("count", count, _LISTED)

    def end_session(self, agent: str, session: str | int) -> None:
        """Forget what a session has spent: its id may come again, with full limits. What it holds stays held."""
        for ask in self._session_asks(agent, check_session(session)):
            self._store.forget(ask.name, ask.key, ask.limit, ask.root)

    async def aend_session(self, agent: str, session: str | int) -> None:
        for ask in self._session_asks(agent, check_session(session)):
            await self._store.aforget(ask.name, ask.key, ask.limit, ask.root)

    def _session_asks(self, agent: str, session: str) -> list[Ask]:
        """The counts of a session alone. Some ids of sessions are none of accounts."""
        accounts = self._lookup.effective.accounts
        if not accounts.defaults.get(accounts.levels[-1]) or not is_name(session):
            return []
        of_session = session_path(self.path_of(agent), session)
        asks = asks_of_one(accounts, of_session, "")
        return [ask for ask in asks.asks(asks.costs_of({}), "") if ask.key == of_session]

    def list_accounts(self) -> list[str]:
        """The paths of all accounts above the agents that the policy, a change or an agent names."""
        effective = self._lookup.effective
        level = effective.accounts.agent_level
        named = [path for path, _ in effective.accounts.at.items()]
        named += [rules.account for _, rules in effective.agents.items() if rules.account]
        found = {prefix for path in named for prefix in path_prefixes(path)[:level]}
        return sorted([path for path in found if NO_ACCOUNT not in path.split("/")])

    def path_of(self, agent: str) -> str:
        """The path of an agent."""
        effective, name = self._lookup.effective, check_agent(agent)
        return effective.accounts.agent_path(effective.rules_of(name).account, name)

    def usage(self, first: date, last: date, account: str | None = None) -> list[Usage]:
        """The usage from one day to another, both included, of an account or of all.

        It is told by day, agent, tool and resource. Holds that are open count as what they have reserved. Days are
        those of `accounts.zone`. It is kept for 13 months.
        """
        span = self._usage_span(first, last, account)
        return self._usage(self._account_store.read_usage(*span), account)

    async def ausage(self, first: date, last: date, account: str | None = None) -> list[Usage]:
        span = self._usage_span(first, last, account)
        return self._usage(await self._account_store.aread_usage(*span), account)

    def usage_totals(
        self, first: date, last: date, account: str | None = None, by: Iterable[str] = DEFAULT_GROUPS
    ) -> list[UsageTotal]:
        """The usage from one day to another, by resource and by the groups in `by`.

        That is "day" or "month"; "account", or a level above the agents; "agent"; "tool"; "resource".
        """
        accounts = self._lookup.effective.accounts
        groups = usage_groups(by, accounts)
        return usage_totals(self.usage(first, last, account), groups, accounts)

    async def ausage_totals(
        self, first: date, last: date, account: str | None = None, by: Iterable[str] = DEFAULT_GROUPS
    ) -> list[UsageTotal]:
        accounts = self._lookup.effective.accounts
        groups = usage_groups(by, accounts)
        return usage_totals(await self.ausage(first, last, account), groups, accounts)

    def usage_days(self) -> tuple[date, date]:
        """The first day of which usage is kept, and today, by the days of `accounts.zone`."""
        zone = zone_of(self._lookup.effective.accounts.zone)
        first, today = self._usage_moments()
        return _day_at(first, zone), _day_at(today, zone)

    def _usage_moments(self) -> tuple[int, int]:
        """The starts of both days, in microseconds since 1970."""
        days = Calendar("day", self._lookup.effective.accounts.zone)
        today = days.at(max(round(self._store.clock.wall() * 1_000_000), 0))[0]
        return (days.next(today - KEPT)[0] if today >= KEPT else 0), today

    def _usage_span(self, first: object, last: object, account: object) -> tuple[str, int, int, str | None]:
        accounts = self._lookup.effective.accounts
        root = None if account is None else accounts.root_of(accounts.check_path("account", account))
        zone = zone_of(accounts.zone)
        begin, until = _check_day("first", first), _check_day("last", last)
        if begin > until:
            refuse("first", f"a day up to the last, which is {until}", str(begin))
        start, end = _start_of(begin, zone), _start_of(until + timedelta(days=1), zone)
        return USAGE, max(start, self._usage_moments()[0]), end, root

    def _usage(self, rows: Iterable[UsageRow], account: str | None) -> list[Usage]:
        zone = zone_of(self._lookup.effective.accounts.zone)
        found: dict[tuple[date, str, str, str], Decimal] = {}
        for row in rows:
            path, tool, unit = row.key.split("\t")
            if account is None or is_within(path, account):
                resource, decimals = read_metered_unit(unit)
                of = (_day_at(row.start, zone), path, tool, resource)
                found[of] = found.get(of, Decimal(0)) + in_units(row.amount, decimals)
        return sorted([Usage(*of, amount) for of, amount in found.items()])

    # Changes ---------------------------------------------------------------------------------------------------------

    def set_account_limit(
        self, account: str, resource: str, limit: LimitLike | None, *, tool: str | None = None, by: str = ""
    ) -> None:
        """Limit a resource of an account or an agent by its path. None: back to the policy's limit.

        What is spent and held of a budget stays, whatever the new amount.
        """
        self.change([changes.account_limit(account, resource, limit, tool)], by=by)

    def set_level_limit(
        self, level: str, resource: str, limit: LimitLike | None, *, tool: str | None = None, by: str = ""
    ) -> None:
        """Limit a resource of each account of a level that has no limit of its own. None: back to the policy."""
        self.change([changes.level_limit(level, resource, limit, tool)], by=by)

    def set_plan_limit(
        self, plan: str, resource: str, limit: LimitLike | None, *, tool: str | None = None, by: str = ""
    ) -> None:
        """Limit a resource in a plan of the policy. None: back to the policy's limit."""
        self.change([changes.plan_limit(plan, resource, limit, tool)], by=by)

    def set_account_plan(self, account: str, plan: str | None, *, by: str = "") -> None:
        """Give an account a plan. None: that of the policy."""
        self.change([changes.account_plan(account, plan)], by=by)

    def set_agent_plan(self, agent: str, plan: str | None, *, by: str = "") -> None:
        """Give an agent a plan. None: that of the policy."""
        self.change([changes.agent_plan(agent, plan)], by=by)

    def set_agent_account(self, agent: str, account: str | None, *, by: str = "") -> None:
        """Let an agent belong to an account, "" for none. None: to that of the policy.

        Its open holds are settled on the accounts with which they were made.
        """
        self.change([changes.agent_account(agent, account)], by=by)

    aset_account_limit = in_thread(set_account_limit)
    aset_level_limit = in_thread(set_level_limit)
    aset_plan_limit = in_thread(set_plan_limit)
    aset_account_plan = in_thread(set_account_plan)
    aset_agent_plan = in_thread(set_agent_plan)
    aset_agent_account = in_thread(set_agent_account)


def _check_day(where: str, day: object) -> date:
    if not isinstance(day, date) or isinstance(day, datetime) or not 1970 < day.year < 9990:
        refuse(where, "a date without a time, from 1971-01-01 to 9989-12-31", day)
    return day


def _day_at(moment: int, zone: tzinfo) -> date:
    """The day of a moment in microseconds since 1970."""
    return datetime.fromtimestamp(moment // 1_000_000, UTC).astimezone(zone).date()


def _start_of(day: date, zone: tzinfo) -> int:
    """The start of a day, in microseconds since 1970."""
    return round(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp() * 1_000_000)


def _held(root: str, listed: Iterable[ListedHold]) -> dict[Bound, int]:
    """The reserved amounts of open holds, by account, resource and tool."""
    found: dict[Bound, int] = {}
    for hold in listed:
        if hold.state != OPEN:
            continue
        asks, session = restored_asks(root, hold)
        costs = asks.by_resource(hold.costs)
        # Once, however many limits the account has for the resource.
        for bound, place in {asks.bound_of(row, session): row.resource for row in asks.rows}.items():
            found[bound] = found.get(bound, 0) + (1 if bound.resource == SLOTS else costs[place])
    return found


def _summaries(root: str, listed: Iterable[ListedHold], account: str, most: int) -> list[AccountHoldSummary]:
    found = []
    for hold in listed:
        asks, session = restored_asks(root, hold)
        path = session_path(asks.path, session) if session else asks.path
        if hold.state in (OPEN, EXPIRED) and is_within(path, account):
            summary = AccountHoldSummary(
                id=hold.hold_id.partition("/")[2],
                agent=split_path(asks.path)[-1],
                account=asks.path,
                session=session,
                tool=asks.tool,
                state=hold.state,
                costs=named_costs(asks, hold.costs),
                lease_left=hold.left / 1_000_000,
            )
            found.append(summary)
    return found[:most]
