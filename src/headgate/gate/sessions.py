"""Sessions: a budget of its own for each session of an agent.

The operator's limit of sessions applies to each. Whoever opens a session may ask for a stricter one, and gets at most
what the operator allows. A changed limit applies to open sessions from the next signal on, with a full budget. While
the agent is blocked, nothing passes; what was counted stays.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import SupportsIndex

from headgate.errors import RateLimited, SessionClosed, StoreAway, refuse
from headgate.gate.lookup import AGENTS, Lookup
from headgate.gate.policy import check_agent
from headgate.lifecycle import Closable
from headgate.limits.all_of import AllOf
from headgate.limits.decision import Decision, Limit, Violation
from headgate.limits.fixed import BLOCKED, UNLIMITED
from headgate.limits.notation import rate_of
from headgate.limits.numbers import cost_of
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Ask, Offence, Store, Verb

_NAME = "session"
_LOW = 200  # thousandths of the capacity below which a decision warns


class Sessions:
    """The open sessions of one gate.

    `violated` is called with each denial that was recorded. `account_asks` are what an account of a session counts.
    """

    def __init__(
        self,
        store: Store,
        lookup: Callable[[], Lookup],
        violated: Callable[[str, Violation], None],
        account_asks: Callable[[str, str], list[Ask]],
    ) -> None:
        self.store, self.lookup, self.violated, self.account_asks = store, lookup, violated, account_asks
        self._open: dict[str, Session] = {}

    @property
    def active_buckets(self) -> int:
        """How many sessions have been used and not yet closed, unlimited ones included."""
        return sum(session.used for session in list(self._open.values()))

    def open(self, agent: object, session_id: object, limit: Limit) -> "Session":
        name = check_agent(agent)
        if isinstance(session_id, bool) or not isinstance(session_id, (str, int)):
            refuse("session", "a string or an int", session_id)
        text = str(session_id)
        key = f"{len(name)}:{name}{text}"  # the length first, so that no two pairs share a key
        session = self._open.setdefault(key, Session(self, name, text, key, limit))
        if session.asked != limit:
            refuse(f"session {text}", f"the limit that it was opened with, {session.asked}", limit)
        return session

    def close(self, key: str) -> None:
        self._open.pop(key, None)


class Session(Closable):
    """A session of an agent, opened by `Gate.session`, closed by `close` or at the end of a `with` block."""

    def __init__(self, sessions: Sessions, agent: str, session_id: str, key: str, limit: Limit) -> None:
        self.agent = agent
        self.id = session_id
        self.asked = limit
        """The limit that it was opened with."""
        self.closed = False
        self.used = False
        self._sessions = sessions
        self._key = key
        self._combined: tuple[Limit, Limit] = (UNLIMITED, limit)  # the operator's limit as last seen, and both together

    @property
    def limit(self) -> Limit:
        """The limit in effect: the stricter of the operator's and the one that it was opened with."""
        blocked = self._sessions.lookup().block_of(self.agent) is not None
        return BLOCKED if blocked else self._counted_limit()

    def _counted_limit(self) -> Limit:
        """The limit that signals are counted under: the one in effect, with blocks left aside."""
        allowed = self._sessions.lookup().effective.session_limit_of(self.agent)
        before, combined = self._combined
        if allowed is not before:
            combined = _stricter(self.asked, allowed)
            self._combined = (allowed, combined)
        return combined

    def check(self, cost: SupportsIndex = 1) -> Decision:
        """Let a signal of this cost pass and count it, or deny it, count nothing, and record a violation."""
        ask = self._ask(cost)
        return self._report(self._sessions.store.apply(Verb.CHECK, [ask], _LOW, self._offence()))

    async def acheck(self, cost: SupportsIndex = 1) -> Decision:
        ask = self._ask(cost)
        return self._report(await self._sessions.store.aapply(Verb.CHECK, [ask], _LOW, self._offence()))

    def require(self, cost: SupportsIndex = 1) -> Decision:
        """`check`, but a denial raises `RateLimited`."""
        return self._raise_if_denied(self.check(cost))

    async def arequire(self, cost: SupportsIndex = 1) -> Decision:
        return self._raise_if_denied(await self.acheck(cost))

    def error(self, decision: Decision) -> RateLimited:
        """The error that tells of a denial. Its wait is the session's own, unless the advised one is enforced."""
        limit = decision.limit
        wait = decision.retry_ms if self._sessions.lookup().backoff.enforce else decision.bucket_retry_ms
        retry_ms = None if wait is None else max(wait, 1)
        pace = f"{rate_of(limit):g} signals/sec" if isinstance(limit, TokenBucket) else str(limit)
        return RateLimited(self.agent, rate_of(limit), pace, retry_ms)

    def close(self) -> None:
        """End the session and forget its counts."""
        with suppress(StoreAway):  # they expire by themselves
            for ask in self._end():
                self._sessions.store.forget(ask.name, ask.key, ask.limit, ask.root)

    async def aclose(self) -> None:
        with suppress(StoreAway):
            for ask in self._end():
                await self._sessions.store.aforget(ask.name, ask.key, ask.limit, ask.root)

    def _ask(self, cost: object) -> Ask:
        if self.closed:
            raise SessionClosed(self.id)
        number = cost_of(cost)
        self.used = True
        return Ask(_NAME, self._key, self.limit, number)

    def _offence(self) -> Offence | None:
        """Whom a denial is recorded against: nobody, if the agent is exempt or in shadow mode, and not blocked."""
        lookup = self._sessions.lookup()
        exempt = lookup.effective.is_exempt(self.agent) and lookup.block_of(self.agent) is None
        return None if exempt or self._in_shadow(lookup) else Offence(AGENTS, self.agent, lookup.backoff)

    def _in_shadow(self, lookup: Lookup) -> bool:
        shadow = lookup.policy.shadow or self.agent in lookup.policy.shadow_agents
        return shadow and lookup.block_of(self.agent) is None

    def _report(self, decision: Decision) -> Decision:
        if decision.violation is not None:
            self._sessions.violated(self.agent, decision.violation)
        return decision.as_shadow() if self._in_shadow(self._sessions.lookup()) else decision

    def _raise_if_denied(self, decision: Decision) -> Decision:
        if not decision:
            raise self.error(decision)
        return decision

    def _end(self) -> list[Ask]:
        """End it, and return what it has counted, to be forgotten."""
        first = not self.closed
        self.closed = True
        self._sessions.close(self._key)
        if not first:
            return []
        limit = self._counted_limit()
        own = [] if limit is UNLIMITED else [Ask(_NAME, self._key, limit, 0)]
        return [*own, *self._sessions.account_asks(self.agent, self.id)]


def _stricter(asked: Limit, allowed: Limit) -> Limit:
    """The part of a requested limit that another one allows."""
    if allowed in (UNLIMITED, asked):
        return asked
    if asked is UNLIMITED:
        return allowed
    if BLOCKED in (asked, allowed):
        return BLOCKED
    if not isinstance(asked, TokenBucket) or not isinstance(allowed, TokenBucket):
        return AllOf([asked, allowed])
    (asked_burst, asked_refill, asked_per), (most, refill, per) = asked.fields(), allowed.fields()
    if asked_refill / asked_per < refill / per:
        refill, per = asked_refill, asked_per
    return TokenBucket(min(asked_burst, most), refill, per)
