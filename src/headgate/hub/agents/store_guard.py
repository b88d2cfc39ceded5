"""The hub's guard on a shared store: it notices when the store has lost agents or changes, or is another store.

The id of the store's data is kept in the hub's database as well, and how much of the data the hub has seen. While the
store has another id or less data, agents and changes are neither read nor written, so that nobody can register under
the name of another. Nor can anybody reserve, since every budget would be granted once more. This ends by itself when
the data is back; or an admin accepts the store as it is.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from sqlite3 import Connection
from typing import Final, TypeAlias

import structlog

from headgate.errors import StoreAway, StoreLost
from headgate.hub.storage.database import Database, DatabaseError
from headgate.stores.base import DataVersion, HubStore, Store, StoreGeneration

_Step: TypeAlias = Callable[[], Awaitable[None]]
_ID: Final = "store_generation"
_SEEN: Final = "store_seen"

_log = structlog.get_logger("headgate.hub")


class StoreGuard:
    """Compares a shared store's data with what this hub knows of it; a store in memory is never lost."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database: Final = database
        self._generation: Final[StoreGeneration | None] = store.generation if isinstance(store, HubStore) else None
        self._saved = ("", DataVersion())  # what is in the database
        self._logged = False
        self._accepting: Final = asyncio.Lock()

    @property
    def reason(self) -> str:
        """Why the store's data counts as lost, in words; "" while it does not."""
        return "" if self._generation is None else self._generation.reason

    def require_data(self) -> None:
        """Raise `StoreLost` while the store's data counts as lost."""
        if self.reason:
            raise StoreLost(self.reason)

    async def start(self) -> None:
        """Expect what is in the database. To be called before anything is read from the store."""
        generation = self._generation
        if generation is not None:
            query = "SELECT name, value FROM settings WHERE name IN (?, ?)"
            rows = dict(await self._database.run(lambda db: db.execute(query, (_ID, _SEEN)).fetchall()))
            self._saved = str(rows.get(_ID, "")), _age(str(rows.get(_SEEN, "")))
            generation.expected, generation.seen = self._saved
            await self.probe()

    async def close(self) -> None:
        """Save how much of the data was seen since the last probe. To be called when nothing changes it any more."""
        generation = self._generation
        if generation is not None:
            with suppress(DatabaseError):  # which the log and the health have
                await self._save(generation.expected, generation.seen)

    async def probe(self) -> None:
        """Compare the data; without an id in the database, adopt the store's. Log when the store is lost or back."""
        generation = self._generation
        if generation is None:
            return
        try:
            if generation.expected:
                await generation.check()
            else:
                await generation.claim()
            if self._logged:
                _log.warning("the store has its data again")
            self._logged = False
        except StoreLost as lost:
            if not self._logged:
                _log.error(
                    "the store is lost: nobody can register or hold, and no limit can be changed, until its data is "
                    "restored, or an admin accepts it as it is (headgate store accept)",
                    reason=str(lost),
                )
            self._logged = True
        except StoreAway:
            return  # which the store reports itself
        await self._save(generation.expected, generation.seen)

    async def accept(self, disconnect: _Step, drop: _Step, reload: _Step) -> bool:
        """Accept a lost store's data as it is; False if the store isn't lost.

        `disconnect` ends what the agents are doing, while nobody can be verified. Then the store is accepted, unless it
        has its data again. `drop` deletes what nobody is to inherit, before anybody can register, and `reload` reads
        the changes in the store. If a step fails, the store stays lost to this hub, and can be accepted again.
        """
        generation = self._generation
        if generation is None:
            return False
        async with self._accepting:
            try:
                await generation.check()
                return False
            except StoreLost:
                await disconnect()
            accepted = await generation.accept()
            if not accepted:
                await self.probe()
                return False
            await drop()
            before, generation.expected = (generation.expected, generation.seen), accepted
            try:
                await reload()
                await self._save(accepted, generation.seen)
            except BaseException:
                generation.expected, generation.seen = before
                raise
            self._logged = False
            _log.warning("the store was accepted as it is: agents have to register again")
            return True

    async def _save(self, generation: str, seen: DataVersion) -> None:
        def write(db: Connection) -> None:
            rows = [(_ID, generation), (_SEEN, " ".join(map(str, seen)))]
            db.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)

        if self._saved != (generation, seen):
            await self._database.run(write)
            self._saved = generation, seen


def _age(text: str) -> DataVersion:
    """The saved ids; none if they can't be read."""
    try:
        return DataVersion(*map(int, text.split()))
    except (ValueError, TypeError):
        return DataVersion()
