"""The hub's health: whether it takes work, and whether the store can be reached."""

from typing import Final, Literal

from headgate.stores.base import Store
from headgate.stores.memory import MemoryStore


class Health:
    """The health of one hub, for probes, metrics and dashboards."""

    def __init__(self, store: Store) -> None:
        self._store: Final = store
        self.stopping = False
        """Whether the hub takes no more work."""

    @property
    def degraded(self) -> bool:
        """Whether the store is away."""
        return bool(getattr(self._store, "degraded", False))

    @property
    def store(self) -> Literal["memory", "ok", "away"]:
        """The store's state: "memory" is never away."""
        if self.degraded:
            return "away"
        return "memory" if isinstance(self._store, MemoryStore) else "ok"
