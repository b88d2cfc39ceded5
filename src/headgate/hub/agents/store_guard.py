"""The hub's guard on a shared store: it notices when the store has lost its agents and changes, or is another store.

The id of the store's data is kept in the hub's database as well. While the two differ, agents and changes are neither
read nor written, so that nobody can register under the name of another. This ends by itself when the data is back; or
an admin accepts the store as it is.
"""

from sqlite3 import Connection
from typing import Final

import structlog

from headgate.errors import StoreAway, StoreLost
from headgate.hub.storage.database import Database
from headgate.stores.base import HubStore, Store, StoreGeneration

_NAME: Final = "store_generation"

_log = structlog.get_logger("headgate.hub")


class StoreGuard:
    """Compares the id of a shared store's data with the one that this hub knows; a store in memory has none."""

    def __init__(self, database: Database, store: Store) -> None:
        self._database: Final = database
        self._generation: Final[StoreGeneration | None] = store.generation if isinstance(store, HubStore) else None
        self._saved = ""  # the id in the database
        self._logged = False

    @property
    def reason(self) -> str:
        """Why the store's data counts as lost, in words; "" while it does not."""
        return "" if self._generation is None else self._generation.reason

    async def start(self) -> None:
        """Expect the id that is in the database. To be called before anything is read from the store."""
        if self._generation is not None:
            query = "SELECT value FROM settings WHERE name = ?"
            row = await self._database.run(lambda db: db.execute(query, (_NAME,)).fetchone())
            self._saved = self._generation.expected = "" if row is None else str(row[0])
            await self.probe()

    async def probe(self) -> None:
        """Compare the ids; without one in the database, adopt that of the store. Log when the store is lost or back."""
        generation = self._generation
        if generation is None:
            return
        try:
            if generation.expected:
                await generation.check()
            else:
                await generation.claim()
            if generation.expected != self._saved:
                await self._save(generation.expected)
        except StoreLost as lost:
            if not self._logged:
                _log.error(
                    "the store is lost: no agent can register and no limit can be changed until its data is restored, "
                    "or an admin accepts it as it is (headgate store accept)",
                    reason=str(lost),
                )
            self._logged = True
            return
        except StoreAway:
            return  # which the store reports itself
        if self._logged:
            _log.warning("the store has its data again")
            self._logged = False

    async def is_lost(self) -> bool:
        """Compare the ids now; whether the store is lost."""
        if self._generation is None:
            return False
        try:
            await self._generation.check()
        except StoreLost:
            return True
        return False

    async def accept(self) -> None:
        """Accept a lost store's data as it is."""
        if self._generation is not None:
            await self._save(await self._generation.accept())
            self._logged = False
            _log.warning("the store was accepted as it is: agents have to register again")

    async def _save(self, generation: str) -> None:
        def write(db: Connection) -> None:
            db.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (_NAME, generation))

        await self._database.run(write)
        self._saved = generation
