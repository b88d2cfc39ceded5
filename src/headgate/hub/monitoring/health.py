"""The hub's health: whether it takes work, and whether the store can be reached."""

from typing import Final, Literal

from headgate.stores.base import ServerStore, Store


class Health:
    """The health of one hub, for probes, metrics and dashboards."""

    def __init__(self, store: Store) -> None:
        self._server: Final = store if isinstance(store, ServerStore) else None
        self.stopping = False
        """Whether the hub takes no more work."""

    @property
    def degraded(self) -> bool:
        """Whether the store is away."""
        return self._server is not None and self._server.degraded

    @property
    def store(self) -> Literal["memory", "ok", "away"]:
        """The store's state: "memory" is never away."""
        if self.degraded:
            return "away"
        return "memory" if self._server is None else "ok"
