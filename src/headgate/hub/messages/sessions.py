"""The sessions of agents, each with a limit of its own, and the log of their signals."""

import asyncio
import time
from itertools import islice
from sqlite3 import Connection
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw, Struct

from headgate.errors import SessionClosed
from headgate.gate import Gate
from headgate.gate.policy import check_agent
from headgate.gate.sessions import Session
from headgate.hub.errors import RequestError
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import Signal
from headgate.hub.storage.database import Database, Retention, TotalRetention
from headgate.hub.storage.rows import Time, json_of
from headgate.limits.decision import Limit
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import parse
from headgate.limits.token_bucket import limited

OUTSIDE: Final = ""
"""The session of signals that belong to none. No session can have this name."""


class LoggedSignal(Struct):
    """A signal in the log."""

    number: int
    session: str
    signal: Raw
    at: float


class SessionLog:
    """The open sessions of one hub, and their signals.

    Sessions outlive connections and restarts. What they have spent outlives a restart only if the gate's store does.
    """

    def __init__(self, database: Database, gate: Gate, settings: HubSettings) -> None:
        self._database, self._gate = database, gate
        self._most_sessions = settings.max_sessions
        # Apart, so that an agent can't push out what the application has written about it.
        most, outside = settings.max_signals, "session = ''"
        self._retention: Final = Retention("signals", "agent", most, deleted="session > ''")
        self._retention_outside: Final = Retention("signals", "agent", most, counted=outside, deleted=outside)
        self._total_retention: Final = TotalRetention("signals", "agent", settings.max_stored_signals)
        self._open: Final[dict[str, dict[str, Session]]] = {}
        self._locks: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()

    async def start(self) -> None:
        """Open the sessions again that were open when the hub stopped."""
        rows = await self._database.run(
            lambda db: db.execute("SELECT agent, session, limited FROM sessions").fetchall()
        )
        for agent, session, limit in self._database.rows.read("sessions", rows, _session_row, "the session is closed"):
            self._open.setdefault(agent, {})[session] = self._gate.session(agent, session, limit)

    async def open(self, agent: str, session: str, rate: float | None, burst: int | None) -> Session:
        """Open a session. A rate in signals per second and a burst ask for less than the operator's limit."""
        if (rate is None) != (burst is None):
            detail = "expected rate and burst together; without them the operator's limit applies"
            raise RequestError(400, "invalid", detail)
        limit = UNLIMITED if rate is None or burst is None else limited(rate, burst)
        async with self._lock(agent):
            own = self._open.get(agent, {})
            if session not in own and len(own) >= self._most_sessions:
                raise RequestError(409, "too_many_sessions", f"{len(own)} sessions are open: close one first")
            opened = self._gate.session(agent, session, limit)
            row = (agent, session, str(limit), time.time())
            insert = "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)"
            try:
                await self._database.run(lambda db: db.execute(insert, row))
            except BaseException:
                if session not in own:  # otherwise it stays open as it was
                    await opened.aclose()
                raise
            self._open.setdefault(agent, {})[session] = opened
        return opened

    def find(self, agent: str, session: str) -> Session | None:
        """An open session."""
        return self._open.get(agent, {}).get(session)

    async def write(self, agent: str, session: str, signal: Signal) -> int:
        """Log a signal, whatever the session's limit says; its number. `OUTSIDE` stands for no session."""

        def insert(db: Connection) -> int:
            row = (agent, session, msgspec.json.encode(signal), time.time())
            number = db.execute("INSERT INTO signals (agent, session, signal, at) VALUES (?, ?, ?, ?)", row).lastrowid
            (self._retention_outside if session == OUTSIDE else self._retention).added(db, agent)
            self._total_retention.added(db)
            return number or 0

        return await self._database.run(insert)

    async def close(self, agent: str, session: str) -> None:
        """Close a session; its log stays."""
        which = (agent, session)
        async with self._lock(agent):
            found = self.find(agent, session)
            if found is None:
                raise SessionClosed(session)
            await self._database.run(
                lambda db: db.execute("DELETE FROM sessions WHERE agent = ? AND session = ?", which)
            )
            await found.aclose()
            del self._open[agent][session]
            if not self._open[agent]:
                del self._open[agent]

    async def drop_agent_data(self) -> None:
        """Close all sessions, and drop all signals."""

        def drop(db: Connection) -> None:
            db.execute("DELETE FROM sessions")
            db.execute("DELETE FROM signals")

        await self._database.run(drop)
        closed = [session for own in self._open.values() for session in own.values()]
        self._open.clear()
        for session in closed:
            await session.aclose()

    def _lock(self, agent: str) -> asyncio.Lock:
        """The sessions of one agent are opened and closed one after the other."""
        return self._locks.setdefault(agent, asyncio.Lock())

    async def signals(self, agent: str, session: str, limit: int, before: int | None = None) -> list[LoggedSignal]:
        """The newest signals of a session, or the newest before a number, oldest first."""
        wanted = (
            "SELECT number, session, signal, at FROM signals WHERE agent = ? AND session = ? AND number < ? "
            "ORDER BY number DESC"
        )
        where = (agent, session, 2**62 if before is None else before)
        read = self._database.rows.read
        rows = await self._database.run(
            lambda db: list(islice(read("signals", db.execute(wanted, where), _logged_signal, "not shown"), limit))
        )
        return rows[::-1]

    def open_sessions_of(self, agent: str) -> int:
        """The number of an agent's open sessions."""
        return len(self._open.get(agent, ()))

    @property
    def open_sessions(self) -> int:
        """The number of open sessions."""
        return sum(len(own) for own in self._open.values())


class _SessionRow(NamedTuple):
    agent: str
    session: str
    limit: Limit


def _session_row(row: tuple[Any, ...]) -> _SessionRow:
    agent, session, text = msgspec.convert(row, tuple[str, str, str])
    return _SessionRow(check_agent(agent), session, parse(text))


def _logged_signal(row: tuple[Any, ...]) -> LoggedSignal:
    number, session, signal, at = msgspec.convert(row, tuple[int, str, bytes, Time], builtin_types=(bytes,))
    return LoggedSignal(number, session, json_of(signal), at)
