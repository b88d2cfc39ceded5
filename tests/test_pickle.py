"""Errors and values cross the border of a process: they pickle and copy, with all of their fields."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import headgate
from headgate import (
    BLOCKED,
    UNLIMITED,
    AllOf,
    Gate,
    Limiter,
    MemoryStore,
    Outcome,
    Policy,
    RateLimited,
    SlidingWindow,
    limited,
    per_minute,
)
from headgate.edges.guard import DenialResponse
from headgate.errors import Bound
from headgate.events import AddressChecked, Alerted, Checked, Degraded, PolicyChanged, Violated, ViolationsReset
from headgate.limits.violations import Backoff
from headgate.stores.base import Ask, Change, Edit, Offence, Verb

DECISION = Limiter(per_minute(60)).check("agent")

MADE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "_AgentMoved": (({"usd": 5}, 1.5), {}),
    "HoldDenied": (("not enough left", 1000, Bound("acme", "usd", "")), {}),
    "RateLimited": (("agent", 5.0, "5 signals/sec", 200), {"degraded": True, "bound": Bound("acme", "usd", "")}),
    "UnknownHold": (("agent", "hold-1"), {}),
    "PolicyError": (("policy.toml", ["limits.heavy: expected a limit, got 5", "another"]), {}),
    "RequestError": ((404, "unknown", "no such agent"), {}),
    "RequestDenied": ((DECISION, "heavy", [("retry-after", "1")]), {"by_address": True}),
    "Denied": (
        (DECISION, DenialResponse(429, [(b"content-type", b"text/plain"), (b"content-length", b"1")], b"x")),
        {},
    ),
    "Refused": (("unreachable", "nobody there"), {}),
    "Unsent": (("closed",), {"maybe": True}),
    "TooLong": (("too long", 5.0), {}),
    "TryLater": (("restarting", 1000), {}),
    "HubError": ((503, "away"), {}),
}
"""How an error is made that takes more than a text."""


def errors() -> Iterator[type[BaseException]]:
    """Every exception that a module of headgate defines."""
    for found in pkgutil.walk_packages(headgate.__path__, "headgate."):
        if not found.name.endswith("__main__"):
            module = importlib.import_module(found.name)
            for _, kind in inspect.getmembers(module, inspect.isclass):
                if issubclass(kind, BaseException) and kind.__module__ == found.name:
                    yield kind


def contents(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), error.args, getattr(error, "__dict__", None)


def assert_same(error: BaseException) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert contents(pickle.loads(pickle.dumps(error, protocol))) == contents(error), type(error)
    assert contents(copy.copy(error)) == contents(copy.deepcopy(error)) == contents(error)


@pytest.mark.once
def test_every_error_pickles_with_its_fields() -> None:
    found = {kind.__name__: kind for kind in errors()}
    assert set(MADE) <= set(found)
    assert len(found) > 20
    for name, kind in found.items():
        args, options = MADE.get(name, (("the text",), {}))
        error = kind(*args, **options)
        if hasattr(error, "__dict__"):  # else it is compiled
            error.add_note("a note")
        assert_same(error)


def test_the_errors_of_the_library_pickle_with_their_fields() -> None:
    """Compiled or not."""
    for name in ("RateLimited", "InvalidInput", "PolicyError", "SessionClosed", "StoreAway", "StoreError"):
        args, options = MADE.get(name, (("the text",), {}))
        assert_same(getattr(headgate, name)(*args, **options))
    from headgate.stores.redis.protocol import ForeignData

    assert_same(ForeignData("the text"))


def require(signals: int) -> list[int]:
    session = Gate(Policy()).session("agent", "session", limited(1, signals))
    return [session.require().remaining for _ in range(signals + 1)]


@pytest.mark.once
def test_a_denial_in_a_pool_of_processes_is_raised_and_leaves_the_pool_alone() -> None:
    with ProcessPoolExecutor(1) as pool:
        with pytest.raises(RateLimited) as caught:
            pool.submit(require, 3).result()
        assert caught.value.agent_id == "agent"
        assert caught.value.limit == 1.0
        assert pool.submit(sum, [1, 2]).result() == 3


def values() -> list[object]:
    gate = Gate(Policy(exempt=["monitor"]))
    gate.set_override("planner", "heavy", "20/minute")
    denial = [gate.check("worker", "ws", "heavy") for _ in range(11)][-1]
    violation = denial.violation
    assert violation is not None
    policy = Policy(
        tiers=["bulk"],
        limits={"heavy": "5/minute; 50/hour sliding", "bulk": "1/minute"},
        agents={"a": {"light": "unlimited"}},
        shadow=["light", "bulk"],
    )
    change = Change((Edit("override", "a", "", "heavy", "1/minute"),), "me", 1.0)
    return [
        *(per_minute(60), SlidingWindow(5, 1), AllOf([per_minute(5), SlidingWindow(5, 1)]), UNLIMITED, BLOCKED),
        *(denial, denial.as_shadow(), denial.as_degraded(denial.limit), violation, Outcome.DENY),
        *(gate.standing("worker"), Backoff(steps=[0.1, 1 / 3], quiet=7, enforce=True, alert_after=3, alert_window=9)),
        *(Policy(), policy, gate.policy, gate.effective, change, *change.edits),
        *(Ask("", "a", per_minute(5), 1), Offence("agents", "a", Backoff()), Verb.CHECK),
        *(Checked("a", "ws", "heavy", denial), Violated("a", "ws", "heavy", 1, 1.0), Alerted("a", 10, 300.0)),
        *(ViolationsReset("a"), AddressChecked("::/64", "request", denial), Degraded(True, "away")),
        PolicyChanged("policy reloaded", "me"),
    ]


def test_values_pickle_and_copy() -> None:
    for value in values():
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(value, protocol)) == value, value
        assert copy.copy(value) == value
        assert copy.deepcopy(value) == value


def test_limits_that_count_nothing_stay_the_same_object() -> None:
    for limit in (UNLIMITED, BLOCKED):
        assert pickle.loads(pickle.dumps(limit)) is limit
        assert copy.deepcopy(limit) is limit


READ = """
import pickle, sys
effective = pickle.loads(sys.stdin.buffer.read())
print(all(effective.is_exempt(f"agent-{number}") for number in range(2000)), len(effective.agents))
"""


def test_the_rules_in_effect_can_be_read_by_another_process() -> None:
    """Whose strings have other hashes."""
    effective = Gate(Policy(exempt=[f"agent-{number}" for number in range(2000)])).effective
    done = subprocess.run(
        [sys.executable, "-c", READ], input=pickle.dumps(effective), capture_output=True, timeout=60, check=True
    )
    assert done.stdout.split() == [b"True", b"2000"]


def test_a_store_says_that_it_does_not_pickle() -> None:
    """It has locks and, in a server, connections: each process makes its own."""
    for value in (MemoryStore(), Limiter(per_minute(1)), Gate(Policy())):
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(value)
