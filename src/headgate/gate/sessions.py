"""Sessions: a budget of its own for each session of an agent."""

from contextlib import suppress
from typing import SupportsIndex

from headgate.errors import RateLimited, SessionClosed, StoreAway, refuse
from headgate.gate.policy import check_agent
from headgate.lifecycle import Closable
from headgate.limits.decision import Decision, Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.numbers import cost_of
from headgate.limits.token_bucket import TokenBucket
from headgate.stores.base import Ask, Store, Verb

_NAME = "session"
_LOW = 200  # thousandths of the capacity below which a decision warns


class Sessions:
    """The open sessions of one gate."""

    def __init__(self, store: Store) -> None:
        self.store = store
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
        if session.limit != limit:
            refuse(f"session {text}", f"the limit that it was opened with, {session.limit}", limit)
        return session

    def close(self, key: str) -> None:
        self._open.pop(key, None)


class Session(Closable):
    """A session of an agent, opened by `Gate.session`, closed by `close` or at the end of a `with` block."""

    def __init__(self, sessions: Sessions, agent: str, session_id: str, key: str, limit: Limit) -> None:
        self.agent = agent
        self.id = session_id
        self.limit = limit
        self.closed = False
        self.used = False
        self._sessions = sessions
        self._key = key

    def check(self, cost: SupportsIndex = 1) -> Decision:
        """Let a signal of this cost pass and count it, or deny it and count nothing."""
        return self._sessions.store.apply(Verb.CHECK, [self._ask(cost)], _LOW)

    async def acheck(self, cost: SupportsIndex = 1) -> Decision:
        return await self._sessions.store.aapply(Verb.CHECK, [self._ask(cost)], _LOW)

    def require(self, cost: SupportsIndex = 1) -> Decision:
        """`check`, but a denial raises `RateLimited`."""
        return self._raise_if_denied(self.check(cost))

    async def arequire(self, cost: SupportsIndex = 1) -> Decision:
        return self._raise_if_denied(await self.acheck(cost))

    def close(self) -> None:
        """End the session and forget its counts."""
        if self._end():
            with suppress(StoreAway):  # the bucket expires by itself when it is full
                self._sessions.store.forget(_NAME, self._key, self.limit)

    async def aclose(self) -> None:
        if self._end():
            with suppress(StoreAway):
                await self._sessions.store.aforget(_NAME, self._key, self.limit)

    def _ask(self, cost: object) -> Ask:
        if self.closed:
            raise SessionClosed(self.id)
        number = cost_of(cost)
        self.used = True
        return Ask(_NAME, self._key, self.limit, number)

    def _raise_if_denied(self, decision: Decision) -> Decision:
        if not decision:
            raise RateLimited(self.agent, self.limit, _pace(self.limit), decision.retry_ms)
        return decision

    def _end(self) -> bool:
        first = not self.closed
        self.closed = True
        self._sessions.close(self._key)
        return first and self.limit is not UNLIMITED


def _pace(limit: Limit) -> str:
    return f"{limit.refill / limit.per:g} signals/sec" if isinstance(limit, TokenBucket) else str(limit)
