"""The hub's health: whether it takes work, and whether its store and its disk can be used."""

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from headgate.hub.agents.store_guard import StoreGuard
from headgate.hub.storage.database import DataFile
from headgate.stores.base import ServerStore, Store

ServerState: TypeAlias = Literal["ok", "away", "lost"]
"""The state of a server that is a store: a lost one no longer has its data."""
StoreState: TypeAlias = Literal["memory", ServerState]
"""The state of a hub's store; memory is never away."""


class Health:
    """The health of one hub, for probes, metrics and dashboards."""

    def __init__(self, store: Store, guard: StoreGuard, files: Sequence[DataFile]) -> None:
        self._server: Final = store if isinstance(store, ServerStore) else None
        self._guard, self._files = guard, files
        self.stopping = False
        """Whether the hub takes no more work."""

    @property
    def degraded(self) -> bool:
        """Whether the store is away."""
        return self._server is not None and self._server.degraded

    @property
    def store(self) -> StoreState:
        if self.degraded:
            return "away"
        if self._guard.reason:
            return "lost"
        return "memory" if self._server is None else "ok"

    @property
    def disk(self) -> Literal["ok", "failing"]:
        """Whether the last write to each file of the hub succeeded."""
        return "failing" if any(file.failure for file in self._files) else "ok"

    @property
    def problems(self) -> list[str]:
        """Problems, as sentences; none where all is well."""
        found = []
        if self.degraded:
            found.append("the store can't be reached")
        if self._server is not None and (mistake := self._server.traffic.recent_mistake):
            found.append(f"decisions are degraded by a mistake in the program ({mistake}); the log has it")
        if self._guard.reason:
            found.append(f"{self._guard.reason}: nobody can register or hold, and limits can't be changed")
        failures = dict.fromkeys(file.failure for file in self._files if file.failure)
        return found + [f"the disk can't be written: {failure}" for failure in failures]
