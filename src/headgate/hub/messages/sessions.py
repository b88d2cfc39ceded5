"""Sessions of agents, each with a budget of its own, and the log of their signals."""

import asyncio
import time
from sqlite3 import Connection
from typing import Final
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw, Struct

from headgate.errors import SessionClosed
from headgate.gate import Gate
from headgate.gate.sessions import Session
from headgate.hub.errors import Refused
from headgate.hub.settings import HubSettings
from headgate.hub.sockets.frames import Signal, decode_signal
from headgate.hub.storage.database import Ledger, Newest
from headgate.limits.fixed import UNLIMITED
from headgate.limits.notation import parse
from headgate.limits.token_bucket import limited


class Logged(Struct):
    """A signal as it is in the log."""

    number: int
    session: str
    signal: Raw
    at: float


class Logbook:
    """The sessions that are open in one hub. They outlive connections and restarts; what they have spent doesn't the
    latter, unless the gate's store does."""

    def __init__(self, ledger: Ledger, gate: Gate, settings: HubSettings) -> None:
        self._ledger, self._gate = ledger, gate
        self._most_sessions = settings.max_sessions
        self._newest: Final = Newest("signals", "agent", settings.max_signals)
        self._open: Final[dict[str, dict[str, Session]]] = {}
        self._turns: Final[WeakValueDictionary[str, asyncio.Lock]] = WeakValueDictionary()

    async def start(self) -> None:
        """Open the sessions again that were open when the hub stopped."""
        wanted = "SELECT agent, session, limited FROM sessions"
        for agent, session, text in await self._ledger.run(lambda db: db.execute(wanted).fetchall()):
            self._open.setdefault(agent, {})[session] = self._gate.session(agent, session, parse(text))

    async def open(self, agent: str, session: str, rate: float | None, burst: int | None) -> Session:
        """Open a session, unlimited unless a rate in signals per second and a burst are given."""
        if (rate is None) != (burst is None):
            raise Refused(400, "invalid", "expected a rate and a burst, or neither for a session without a limit")
        limit = UNLIMITED if rate is None or burst is None else limited(rate, burst)
        async with self._turn(agent):
            own = self._open.get(agent, {})
            if session not in own and len(own) >= self._most_sessions:
                raise Refused(409, "too_many_sessions", f"{len(own)} sessions are open: close one first")
            opened = self._gate.session(agent, session, limit)
            row = (agent, session, str(limit), time.time())
            await self._ledger.run(lambda db: db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row))
            self._open.setdefault(agent, {})[session] = opened
        return opened

    async def signal(self, agent: str, session: str, signal: Raw) -> int:
        """Write a signal to a session's log, if the session is open, the limit lets it, and it is valid; its number."""
        found = self._open.get(agent, {}).get(session)
        if found is None:
            raise SessionClosed(session)
        await found.arequire()
        return await self.write(agent, session, decode_signal(signal))

    async def write(self, agent: str, session: str, signal: Signal) -> int:
        """Write a signal of the application's own: no limit holds for it. Its number."""

        def insert(db: Connection) -> int:
            row = (agent, session, msgspec.json.encode(signal), time.time())
            number = db.execute("INSERT INTO signals (agent, session, signal, at) VALUES (?, ?, ?, ?)", row).lastrowid
            self._newest.added(db, agent)
            return number or 0

        return await self._ledger.run(insert)

    async def close(self, agent: str, session: str) -> None:
        """Close a session; its log stays."""
        which = (agent, session)
        async with self._turn(agent):
            found = self._open.get(agent, {}).get(session)
            if found is None:
                raise SessionClosed(session)
            await self._ledger.run(lambda db: db.execute("DELETE FROM sessions WHERE agent = ? AND session = ?", which))
            await found.aclose()
            del self._open[agent][session]
            if not self._open[agent]:
                del self._open[agent]

    def _turn(self, agent: str) -> asyncio.Lock:
        """Sessions of one agent are opened and closed one after the other."""
        return self._turns.setdefault(agent, asyncio.Lock())

    async def signals(self, agent: str, session: str, limit: int, before: int | None = None) -> list[Logged]:
        """The newest signals of a session's log, or of those before a number, oldest first."""
        wanted = (
            "SELECT number, session, signal, at FROM signals WHERE agent = ? AND session = ? AND number < ? "
            "ORDER BY number DESC LIMIT ?"
        )
        where = (agent, session, 2**62 if before is None else before, limit)
        rows = await self._ledger.run(lambda db: db.execute(wanted, where).fetchall())
        return [Logged(number, name, Raw(signal), at) for number, name, signal, at in reversed(rows)]

    @property
    def open_sessions(self) -> int:
        return sum(len(own) for own in self._open.values())
