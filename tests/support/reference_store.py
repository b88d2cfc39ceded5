"""The model of holds as a store, so that the cases and laws that judge stores can judge it."""

from collections.abc import Callable, Sequence
from typing import Any

from headgate import Decision, ManualClock
from headgate.stores.base import Ask, Offence, Verb
from headgate.stores.holds import ListedHold
from headgate.stores.reference_holds import HoldReference


class ReferenceStore(HoldReference):
    """Its holds and accounts. It has no violations, remembers no request, and forgets no key."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.clock = clock

    def apply(
        self, verb: Verb, asks: Sequence[Ask], low: int, offence: Offence | None = None, request_id: str = ""
    ) -> Decision:
        return super().apply(verb, asks, low)

    def list_holds(self, name: str, key: str, count: int = 1000) -> list[ListedHold]:
        return sorted(super().list_holds(name, key), key=lambda held: held.left)[:count]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("record_violation", "standing", "forget", "clear"):
            return _unsupported
        if name.startswith("a") and not name.startswith("_"):
            return _twin(getattr(self, name[1:]))
        raise AttributeError(name)


def _twin(verb: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any, **options: Any) -> Any:
        return verb(*arguments, **options)

    return call


def _unsupported(*_: object) -> None:
    raise NotImplementedError
