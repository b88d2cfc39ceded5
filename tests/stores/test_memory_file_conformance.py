"""A memory store with a file conforms, and restarts change nothing of what it answers."""

import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headgate import ManualClock, MemoryStore
from headgate.stores import conformance
from headgate.stores.account_walks import ACCOUNT_WALKS
from headgate.stores.base import Store
from headgate.stores.hold_walks import WALKS, compare_holds, random_hold_steps
from headgate.stores.reference import BudgetModel, Model, SlotsModel

pytestmark = pytest.mark.once


CASES = [
    pytest.param(case, id=case.__name__, marks=[pytest.mark.long] if case in (*WALKS, *ACCOUNT_WALKS) else [])
    for case in (*conformance.HOLD_CASES, *conformance.ACCOUNT_CASES)
]
"""The walks take seconds each; in memory they are walked with every change."""


@pytest.mark.parametrize("case", CASES)
def test_conformance(tmp_path: Path, case: conformance.Case) -> None:
    with ExitStack() as stack:
        numbers = count()

        def make(clock: ManualClock) -> MemoryStore:
            path = tmp_path / f"{next(numbers)}.db"
            return stack.enter_context(closing(MemoryStore(clock=clock, remember=path)))

        case(make)


class LaterClock(ManualClock):
    """A clock that began later than another one, and shows the same time of day."""

    def __init__(self, other: ManualClock, began: int) -> None:
        super().__init__()
        self._other, self._began = other, began

    def now(self) -> int:
        return self._other.now() - self._began

    def wall(self) -> float:
        return self._other.wall()


def restarting_store(clock: ManualClock, path: Path, chance: random.Random, stores: list[MemoryStore]) -> Store:
    """A store that begins anew with its file at some of its calls."""

    def call(name: str) -> Callable[..., Any]:
        def forward(_self: object, *arguments: Any, **options: Any) -> Any:
            if not stores or chance.random() < 0.3:
                for store in stores[-1:]:
                    store.close()
                stores.append(MemoryStore(clock=LaterClock(clock, chance.randint(0, clock.now())), remember=path))
            return getattr(stores[-1], name)(*arguments, **options)

        return forward

    methods = [name for name in dir(MemoryStore) if callable(getattr(MemoryStore, name)) and not name.startswith("_")]
    made: Store = type("RestartedStore", (), {"clock": clock} | {name: call(name) for name in methods})()
    return made


@pytest.mark.parametrize("seed", range(2))
def test_restarts_change_nothing(tmp_path: Path, seed: int) -> None:
    """A store of budgets and slots equals the reference, which never restarts."""
    chance = random.Random(seed)
    stores: list[MemoryStore] = []
    for number in range(8):
        budget = BudgetModel(chance.choice((5, 20, 100)), chance.choice((None, "hour", "day")))
        asked: list[list[Model]] = [[budget, SlotsModel(chance.choice((1, 2, 3)))], [BudgetModel(30, None)]]
        asked = asked[: chance.randint(1, 2)]
        steps = random_hold_steps(chance, asked, 40)
        try:
            compare_holds(
                partial(restarting_store, path=tmp_path / f"{number}", chance=chance, stores=stores), asked, steps
            )
        finally:
            stores.pop().close()
            stores.clear()
