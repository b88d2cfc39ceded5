"""Features meet: every verb of every caller, on every store with every option, under every kind of limit.

`VERBS` says which verbs there are and what they take, `STORES` and `LIMITS` what they run on. A walk makes random steps
in one combination, and compares every answer with the slow model of `headgate.stores.reference`. `BAD_OPTIONS` and
`REFUSED` list what is refused, with the text of each.
"""

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Any, Final
from uuid import uuid4

import pytest
import redis.asyncio

from headgate import (
    BLOCKED,
    UNLIMITED,
    Decision,
    Gate,
    Limit,
    Limiter,
    ManualClock,
    MemoryStore,
    Outcome,
    Policy,
    RateLimited,
    RedisStore,
    SessionClosed,
    StoreAway,
)
from headgate.gate.sessions import Session
from headgate.limits.numbers import LARGEST
from headgate.stores.base import Ask, Store, Verb
from headgate.stores.reference import BucketModel, Model, ReferenceKey, WindowModel
from tests.support.ports import unused_port
from tests.support.redis_store import StoreWithoutChangeLog
from tests.support.refusals import refusal
from tests.support.valkey import PATIENCE, ValkeyServer

# The table ------------------------------------------------------------------------------------------------------------

VERBS: Final[dict[type, dict[str, set[str]]]] = {
    Limiter: {
        "check": {"cost", "request_id"},
        "peek": {"cost"},
        "charge": {"cost", "request_id"},
        "refund": {"cost", "request_id"},
        "acquire": {"cost", "timeout"},
        "reset": set(),
    },
    Gate: {
        "check": {"cost", "request_id"},
        "peek": set(),
        "charge": {"cost"},
        "refund": {"cost"},
        "drop_agent": set(),
        "check_address": {"cost"},
        "charge_address": {"cost"},
        "refund_address": {"cost"},
    },
    Session: {"check": {"cost"}, "require": {"cost"}, "close": set()},
}
"""The verbs that count, and what they take besides a key. Each has an async twin."""

CALLERS: Final[dict[str, tuple[type, list[str]]]] = {
    "limiter": (Limiter, [*VERBS[Limiter]]),
    "agent": (Gate, ["check", "peek", "charge", "refund", "drop_agent"]),
    "address": (Gate, ["check_address", "charge_address", "refund_address"]),
    "session": (Session, [*VERBS[Session]]),
}

STORES: Final[dict[str, dict[str, Any]]] = {
    "memory": {},
    "redis": {},
    "redis, draws ahead": {"draw_ahead": 0.3},
    "redis, remembers denials": {"remember_denials": True},
    "redis, draws ahead and remembers denials": {"draw_ahead": 0.3, "remember_denials": True},
    "away, local": {"on_failure": "local"},
    "away, local, draws ahead and remembers denials": {"draw_ahead": 0.3, "remember_denials": True},
    "away, open": {"on_failure": "open"},
    "away, closed": {"on_failure": "closed"},
}

BUCKET: Final = (10, Fraction(60), Fraction(60))
WINDOW: Final = (7, Fraction(5))
LIMITS: Final[dict[str, Callable[[], list[Model]]]] = {
    "bucket": lambda: [BucketModel(*BUCKET)],
    "window": lambda: [WindowModel(*WINDOW)],
    "both": lambda: [BucketModel(*BUCKET), WindowModel(*WINDOW)],
    "unlimited": lambda: [BucketModel(*BUCKET)],  # not asked
    "blocked": lambda: [BucketModel(*BUCKET)],
}

APPLIED: Final = {
    "peek": Verb.PEEK,
    "charge": Verb.CHARGE,
    "charge_address": Verb.CHARGE,
    "refund": Verb.REFUND,
    "refund_address": Verb.REFUND,
}
"""The verbs of a store behind those of callers; the others check."""
RESETS: Final = ("reset", "drop_agent", "close")
SPANS: Final = (0, 0, 0, 0, 1000, 50_000, 150_000, 700_000, 5_000_000)
COSTS: Final = (1, 1, 1, 2, 3, 7, 10, 11, LARGEST + 5)


# The oracle -----------------------------------------------------------------------------------------------------------


class Oracle:
    """What a combination should answer, step by step."""

    def __init__(self, store: str, limit: str) -> None:
        self._models = LIMITS[limit]
        self.fixed = {"unlimited": UNLIMITED, "blocked": BLOCKED}.get(limit)
        self.key = self._fresh()
        self.limit: Limit = self.fixed or self.key.limit
        self.options = STORES[store]
        self.away = store.startswith("away")
        self.from_server = store.startswith("redis")
        draws = 0 if self.away or limit != "bucket" else self.options.get("draw_ahead", 0)
        self.slice = int(BUCKET[0] * Fraction(str(draws)))
        self.remembers = bool(self.options.get("remember_denials")) and not self.away
        self.answers: dict[tuple[Verb, str], tuple[int, Decision]] = {}

    def _fresh(self) -> ReferenceKey:
        return ReferenceKey(self._models())

    def reset(self) -> None:
        self.key = self._fresh()

    def decide(self, verb: Verb, now: int, cost: int) -> Decision:
        if self.fixed is not None:
            outcome = Outcome.ALLOW if self.fixed is UNLIMITED else Outcome.DENY
            return Decision(outcome, self.fixed, self.fixed.capacity, 0 if outcome is Outcome.ALLOW else -1, 0, -1)
        return self.key.apply(verb, now, cost)

    def judge(self, verb: Verb, now: int, cost: int, request_id: str | None, got: Decision) -> None:
        """Compare an answer with the one that is expected, and count what it has counted."""
        # A limit that counts nothing needs no server, unless there are a request id or violations to keep.
        assert got.degraded == self.away or (self.away and self.fixed is not None)
        on_failure = self.options.get("on_failure")
        if got.degraded and (on_failure == "closed" or (on_failure == "open" and self.fixed is not BLOCKED)):
            passes = on_failure == "open"
            assert (bool(got), got.retry_after) == (passes, 0.0 if passes else 1.0)
            return
        known = self.answers.get((verb, request_id or ""))
        if known is not None and now < known[0]:
            if self.from_server:  # which stores the count, and decides on it again
                assert got or not known[1]
            else:
                assert without_gate_fields(got) == without_gate_fields(known[1])
            return
        if verb is Verb.CHECK:
            expected = self.decide(Verb.PEEK, now, cost)
            if got:
                expected = self.decide(Verb.CHECK, now, cost)
                assert expected, f"it passes beyond the limit: {got}"
        else:
            expected = self.decide(verb, now, cost)
        self._compare(verb, expected, got)
        if request_id and (got or verb is not Verb.CHECK):
            self.answers[verb, request_id] = (now + 60_000_000, got)

    def _compare(self, verb: Verb, expected: Decision, got: Decision) -> None:
        if self.remembers and verb is Verb.CHECK and not got and not expected:
            # Perhaps said before, for a lower cost; what was left may have been spent since, in small costs that pass.
            # A wait may be longer where tokens that were drawn ahead and not used in time count as spent.
            own, longest = got.bucket_retry_after, expected.retry_after
            assert longest is None or (own is not None and own > 0 and (self.slice or own <= longest))
        elif self.slice:  # this process may hold some of what is left, and tokens that it didn't use in time are spent
            assert got.remaining <= expected.remaining
            assert expected or not got
        else:
            assert without_gate_fields(got) == without_gate_fields(expected)


def without_gate_fields(decision: Decision) -> tuple[object, ...]:
    """A decision without what a gate adds."""
    own = decision.bucket_retry_after
    return decision.outcome, decision.limit, decision.remaining, own, decision.reset_after, decision.bound


# The walk -------------------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Calls verbs on one key, as threads or as tasks do."""

    kind: str
    store: Store
    limit: Limit
    run: Callable[[Coroutine[Any, Any, Any]], Any] | None
    target: Any = field(init=False)
    key: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        text = str(self.limit)
        if self.kind == "limiter":
            self.target, self.key = Limiter(self.limit, store=self.store), ("key",)
            return
        gate = Gate(Policy(limits={"heavy": text}, addresses={"limit": text}), store=self.store)
        self.target = gate.session("agent", "session", self.limit) if self.kind == "session" else gate
        self.key = {"agent": ("agent", "ws", "heavy"), "address": ("192.0.2.1",), "session": ()}[self.kind]
        self.gate = gate

    def call(self, verb: str, **options: Any) -> Any:
        key = self.key[:1] if verb == "drop_agent" else self.key
        if self.run is None:
            return getattr(self.target, verb)(*key, **options)
        return self.run(getattr(self.target, f"a{verb}")(*key, **options))

    def reset(self, verb: str) -> None:
        self.call(verb)
        if self.kind == "session":
            self.target = self.gate.session("agent", "session", self.limit)


def check_walk(server: ValkeyServer, store: str, caller: str, limit: str, twin: bool, seed: int, steps: int) -> None:
    chance = random.Random(f"{store} {caller} {limit} {twin} {seed}")
    oracle = Oracle(store, limit)
    with opened_store(server, store) as made, asyncio.Runner() as runner:
        clock: Any = made.clock
        one = Caller(caller, made, oracle.limit, runner.run if twin else None)
        kind, verbs = CALLERS[caller]
        history = []
        for verb, with_id in random_verbs(chance, kind, verbs, steps):
            span, cost = chance.choice(SPANS), chance.choice(COSTS)
            takes = VERBS[kind][verb]
            if verb in APPLIED and cost > LARGEST:  # a model that counts tokens one by one would never end
                cost = 20
            options: dict[str, Any] = {"cost": cost} if "cost" in takes else {}
            if "timeout" in takes:
                options["timeout"] = 0
            if with_id:
                options["request_id"] = chance.choice("123")
            clock.advance(Fraction(span, 1_000_000))
            history.append(f"{span} us, {verb} {options}")
            try:
                take_step(one, oracle, verb, clock.now(), options)
            except BaseException as error:
                error.add_note("\n".join([f"{store}, {caller}, {limit}, {'async' if twin else 'sync'}:", *history]))
                raise
        if twin and isinstance(made, RedisStore):
            runner.run(made.aclose())


def random_verbs(chance: random.Random, kind: type, verbs: list[str], steps: int) -> list[tuple[str, bool]]:
    """Verbs in random order, and whether they have a request id: each of them at least once, in every walk."""
    with_id = [verb for verb in verbs if "request_id" in VERBS[kind][verb]]
    found = [*product(verbs, [False]), *product(with_id, [True])]
    for _ in range(steps - len(found)):
        verb = chance.choice(verbs)
        found.append((verb, verb in with_id and chance.random() < 0.3))
    chance.shuffle(found)
    return found


def take_step(one: Caller, oracle: Oracle, verb: str, now: int, options: dict[str, Any]) -> None:
    if verb in RESETS:
        kept = oracle.away and (verb == "drop_agent" or oracle.fixed is None)  # what can't be dropped stays here, too
        if kept and verb != "close":
            with pytest.raises(StoreAway):
                one.call(verb)
        else:
            one.reset(verb)
        if not kept:
            oracle.reset()
        return
    cost = options.get("cost", 1)
    try:
        got = one.call(verb, **options)
    except RateLimited as error:
        got = one.call("check", **options)  # which a denial doesn't change
        wait = None if got.bucket_retry_ms is None else max(got.bucket_retry_ms, 1)
        if oracle.slice:  # the second one may have given drawn tokens back
            wait = error.retry_after_ms
        assert (verb, bool(got), error.retry_after_ms) == ("require", False, wait)  # noqa: PT017 - or it passes
    oracle.judge(APPLIED.get(verb, Verb.CHECK), now, cost, options.get("request_id"), got)


_IDLE = threading.Thread(target=lambda: None)
_IDLE.start()


@contextmanager
def opened_store(server: ValkeyServer, store: str) -> Iterator[Store]:
    """An empty store on a clock that only the test advances."""
    clock = ManualClock(start=1000)
    with ExitStack() as stack:
        if store == "memory":
            yield MemoryStore(clock=clock)
            return
        url = f"redis://127.0.0.1:{stack.enter_context(unused_port())}" if store.startswith("away") else server.url
        options = {"prefix": f"meet-{uuid4().hex}:", "clock": clock, "timeout": PATIENCE, **STORES[store]}
        made = stack.enter_context(StoreWithoutChangeLog(url, **options))
        if made._flusher is not None:
            made._flusher._thread._thread = _IDLE  # nothing is sent by itself: that would depend on the machine's speed
        yield made


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("store", STORES)
def test_every_verb_answers_as_the_model_does(redis_server: ValkeyServer, store: str, caller: str) -> None:
    for limit, twin in product(LIMITS, (False, True)):
        check_walk(redis_server, store, caller, limit, twin, seed=0, steps=20)


@pytest.mark.long
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("store", STORES)
def test_every_verb_answers_as_the_model_does_for_long(redis_server: ValkeyServer, store: str, caller: str) -> None:
    for limit, twin, seed in product(LIMITS, (False, True), range(1, 6)):
        check_walk(redis_server, store, caller, limit, twin, seed, steps=200)


# The table is complete ------------------------------------------------------------------------------------------------


APART: Final = ("hold", "check_limit")  # it has walks of its own, in conformance; and the second half of `check`


def verbs_of(kind: type) -> dict[str, set[str]]:
    """The public methods that take a cost, or that the table has, with the options of the table that they take."""
    found = {}
    for name, method in inspect.getmembers(kind, callable):
        if name.startswith("_") or (name.startswith("a") and hasattr(kind, name[1:])) or name in APART:
            continue
        takes = set(inspect.signature(method).parameters) if name != "subscribe" else set()
        if "cost" in takes or name in VERBS[kind]:
            found[name] = takes & {"cost", "request_id", "timeout"}
    return found


@pytest.mark.parametrize("kind", VERBS, ids=lambda kind: kind.__name__)
def test_the_table_has_every_verb_and_its_twin(kind: type) -> None:
    assert verbs_of(kind) == VERBS[kind]
    for verb, takes in VERBS[kind].items():
        twin = set(inspect.signature(getattr(kind, f"a{verb}")).parameters) & {"cost", "request_id", "timeout"}
        assert twin == takes, verb


# What is refused ------------------------------------------------------------------------------------------------------

BAD_OPTIONS: Final[dict[str, tuple[object, str]]] = {
    "cost": (0, "cost: expected a whole number of at least 1, got 0"),
    "request_id": ("", "request_id: expected 1 to 200 characters, got ''"),
    "timeout": (-1, "timeout: expected a number of seconds, 0 or more, got -1"),
}

REFUSED: Final[dict[str, tuple[Callable[[], object], str]]] = {
    "draws for tasks alone": (
        lambda: RedisStore(redis.asyncio.Redis(), draw_ahead=0.1),
        "RedisStore: expected a client for threads with remember_denials or draw_ahead: a thread sends owed violations",
    ),
    "denials for tasks alone": (
        lambda: RedisStore(redis.asyncio.Redis(), remember_denials=True),
        "RedisStore: expected a client for threads with remember_denials or draw_ahead: a thread sends owed violations",
    ),
    "draws of more than everything": (
        lambda: RedisStore("redis://127.0.0.1:1", draw_ahead=1.5),
        "RedisStore draw_ahead: expected a number from 0 to 1 with at most three decimals, got 1.5",
    ),
    "another failure policy": (
        lambda: RedisStore("redis://127.0.0.1:1", on_failure="maybe"),
        "RedisStore on_failure: expected one of open, closed, local, got 'maybe'",
    ),
}


@pytest.mark.parametrize("twin", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("store", STORES)
def test_a_bad_option_of_any_verb_is_refused_by_text(
    redis_server: ValkeyServer, store: str, caller: str, twin: bool
) -> None:
    kind, verbs = CALLERS[caller]
    with opened_store(redis_server, store) as made, asyncio.Runner() as runner:
        one = Caller(caller, made, Oracle(store, "bucket").limit, runner.run if twin else None)
        for verb, option in product(verbs, BAD_OPTIONS):
            bad, text = BAD_OPTIONS[option]
            takes = VERBS[kind][verb]
            options = {"cost": 1} if "cost" in takes else {}
            if option in takes:
                assert refusal(one.call, verb, **options | {option: bad}) == text
            else:
                with pytest.raises(TypeError, match=option):
                    one.call(verb, **options | {option: bad})
        if twin and isinstance(made, RedisStore):
            runner.run(made.aclose())


@pytest.mark.parametrize("what", REFUSED)
def test_a_combination_of_options_is_refused_by_text(what: str) -> None:
    make, text = REFUSED[what]
    assert refusal(make).startswith(text)


@pytest.mark.parametrize("store", STORES)
def test_a_key_that_is_asked_twice_is_refused_by_text(redis_server: ValkeyServer, store: str) -> None:
    with opened_store(redis_server, store) as made:
        limit = Oracle(store, "bucket").limit
        for verb in Verb:
            twice = [Ask("", "a", limit, 1), Ask("", "a", limit, 1)]
            assert refusal(made.apply, verb, twice, 0) == "asks: expected each key once, got ['a', 'a']"


def test_a_closed_session_is_refused_by_text() -> None:
    session = Gate(Policy()).session("agent", "session")
    session.close()
    for verb in ("check", "require"):
        with pytest.raises(SessionClosed, match=r"^session session is closed$"):
            getattr(session, verb)()
