"""A store under load while its server fails: the decisions that callers got, and how long they waited.

Threads, or tasks of an event loop, check two keys over and over. One key is being used up; the other was used up before
and is only denied.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Self

from headgate import Decision, Limiter, TokenBucket
from headgate.events import Degraded
from headgate.stores.redis import RedisStore
from tests.support.redis_store import BACK, SLACK, ProcessTime
from tests.support.valkey import PATIENCE, wait_for

CAPACITY = 200
DAY = 86_400
LIMIT = TokenBucket(CAPACITY, 1, DAY)  # no refill while a test runs

IMPATIENT = 1.0
"""The timeout of a store whose server hangs: some calls time out, a few of them only because the machine is slow.

Where the fault is an error, the store is patient, so that only the fault can degrade a decision.
"""

WORKERS = 12  # more than the store has senders
PACE = 0.02

HOT, SPENT = "hot", "spent"


class Moment(NamedTuple):
    real: float
    own: float
    """By `ProcessTime`."""


class Call(NamedTuple):
    key: str
    began: Moment
    ended: Moment
    decision: Decision


class FaultLoad:
    """Workers that check both keys over and over until the block ends, and their calls."""

    def __init__(self, limiter: Limiter, kind: str) -> None:
        self.calls: list[Call] = []
        self.errors: list[BaseException] = []
        self.clean = Moment(math.inf, math.inf)
        """When full service was observed again."""
        self._limiter = limiter
        self._watch = ProcessTime()
        self._passed: dict[str, list[Call]] = {HOT: [], SPENT: []}
        self._ration = math.inf
        self._stopped = threading.Event()
        run = {"threads": [self._thread] * WORKERS, "tasks": [self._loop]}[kind]
        self._threads = [threading.Thread(target=target) for target in run]

    def __enter__(self) -> Self:
        self._watch.__enter__()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._watch.__exit__()

    def moment(self) -> Moment:
        return Moment(time.monotonic(), self._watch.seconds)

    def _keys(self) -> list[str]:
        return [HOT, SPENT] if self._ration == math.inf or self.passed() < self._ration else [SPENT]

    def _thread(self) -> None:
        try:
            while True:
                for key in self._keys():
                    began = self.moment()
                    self._note(key, began, self._limiter.check(key))
                if self._stopped.wait(PACE):
                    return
        except BaseException as error:  # noqa: BLE001 - the test expects none
            self.errors.append(error)

    def _loop(self) -> None:
        try:
            asyncio.run(self._tasks())
        except BaseException as error:  # noqa: BLE001
            self.errors.append(error)

    async def _tasks(self) -> None:
        async def work() -> None:
            while True:
                for key in self._keys():
                    began = self.moment()
                    self._note(key, began, await self._limiter.acheck(key))
                if self._stopped.is_set():
                    return
                await asyncio.sleep(PACE)

        results = await asyncio.gather(*[work() for _ in range(WORKERS)], return_exceptions=True)
        self.errors += [result for result in results if result is not None]

    def _note(self, key: str, began: Moment, decision: Decision) -> None:
        call = Call(key, began, self.moment(), decision)
        self.calls.append(call)
        if decision and not decision.degraded:
            self._passed[key].append(call)

    # Observed --------------------------------------------------------------------------------------------------------

    def of(self, key: str, *, degraded: bool) -> list[Call]:
        return [call for call in list(self.calls) if call.key == key and call.decision.degraded is degraded]

    def passed(self, key: str = HOT) -> int:
        """The number of checks that the server let pass."""
        return len(self._passed[key])

    def degraded(self) -> list[Call]:
        return [call for call in list(self.calls) if call.decision.degraded]

    def used_up(self) -> bool:
        return not all(call.decision for call in self.of(HOT, degraded=False))

    def longest(self) -> float:
        return max(call.ended.own - call.began.own for call in self.calls)

    # Waiting ---------------------------------------------------------------------------------------------------------

    def ration(self) -> None:
        """From now on let the workers spend only what `wait_for_passes` asks for, and what is under way."""
        self._ration = self.passed()

    def wait_for_passes(self, tokens: int) -> None:
        """Wait until that many more have passed, or none is left: some may be lost with an answer."""
        goal = self.passed() + tokens
        if self._ration < math.inf:
            self._ration = goal
        self._wait(lambda: self.passed() >= goal or self.used_up(), f"{goal} passes")

    def stay_degraded(self, seconds: float) -> None:
        """Wait that long, and until both keys have been decided without the server."""
        began = time.monotonic()
        self._wait(lambda: self._without(began, began + seconds), f"degraded decisions for {seconds} s")

    def _without(self, since: float, until: float) -> bool:
        keys = {call.key for call in self.degraded() if call.began.real >= since}
        return keys == {HOT, SPENT} and time.monotonic() >= until

    def wait_for_recovery(self) -> Moment:
        """Wait until as many calls as all workers make in two rounds were not degraded, and return the start."""
        since, calls = self.moment(), 4 * WORKERS
        self._wait(lambda: self._clean(since, calls), "full service")
        self.clean = self.moment()
        return since

    def _clean(self, since: Moment, count: int) -> bool:
        last = self.calls[-count:]
        return all(call.began.real >= since.real and not call.decision.degraded for call in last)

    def use_up(self) -> None:
        """Wait until the server denies the key that is being used up."""
        self._ration = math.inf
        self._wait(self.used_up, "a denial")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(lambda: self.errors or condition(), what)
        assert self.errors == []


class FaultTrial:
    """A store under load, and the assertions on what it did."""

    def __init__(self, url: str, policy: str, kind: str, timeout: float) -> None:
        self.store = RedisStore(url, on_failure=policy, timeout=timeout)
        self.limiter = Limiter(LIMIT, store=self.store)
        self.load = FaultLoad(self.limiter, kind)
        self.events: list[Degraded] = []
        self._policy = policy
        self._timeout = timeout
        self._sure = RedisStore(url, timeout=PATIENCE)  # for the test's own questions
        self._full_at = 0.0
        self.store.subscribe(self._hear)

    @property
    def _patient(self) -> bool:
        return self._timeout == PATIENCE

    def _hear(self, event: object) -> None:
        assert isinstance(event, Degraded)
        self.events.append(event)

    def exhaust(self) -> None:
        limiter = self.limiter if self._patient else Limiter(LIMIT, store=self._sure)
        passed = sum(bool(limiter.check(SPENT)) for _ in range(CAPACITY + 1))
        assert passed == CAPACITY
        self._full_at = self._full()

    def _full(self) -> float:
        """When the key will be full again."""
        decision = Limiter(LIMIT, store=self._sure).peek(SPENT)
        assert (decision.degraded, decision.remaining) == (False, 0)
        return time.monotonic() + decision.reset_after

    def close(self) -> None:
        self.store.close()
        self._sure.close()

    # Assertions ------------------------------------------------------------------------------------------------------

    def check_recovery(self, back: Moment) -> None:
        """The fault harmed no caller, and ended at `back`; at most twice the capacity passed."""
        self.check_callers()
        self._check_degraded_until(back)
        assert self.load.passed() <= 2 * CAPACITY
        self.check_fresh_key()

    def check_callers(self) -> None:
        """No exception, no long wait; without the server, decisions follow the failure policy."""
        assert self.load.errors == []
        waits = 0.0 if self._patient else 2 * self._timeout  # for the call before, and for its own
        assert self.load.longest() < waits + SLACK
        for key in (HOT, SPENT):
            alone = self.load.of(key, degraded=True)
            expected = {"open": len(alone), "closed": 0, "local": min(len(alone), CAPACITY)}[self._policy]
            assert sum(bool(call.decision) for call in alone) == expected

    def _check_degraded_until(self, back: Moment) -> None:
        """The store was degraded, not for long after the server was back, and listeners heard of both."""
        alone = self.load.degraded()
        assert alone
        if not self._patient:  # a call later on may have been too slow
            alone = [call for call in alone if call.began.real < self.load.clean.real]
            wait_for(lambda: not self.limiter.peek(SPENT).degraded, "the server's answer")
        late = max(call.ended.own for call in alone) - back.own
        print(f"\n{len(alone)} degraded, the last {late:.2f} s after the end; longest {self.load.longest():.3f} s")
        assert late < BACK
        assert not self.store.degraded
        assert [event.degraded for event in self.events] == [True, False] * (len(self.events) // 2)
        assert self.events
        assert self.events[0].reason

    def check_denials_spent_nothing(self) -> None:
        """A charged denial would have delayed the refill by a day."""
        denied = [call for call in self.load.of(SPENT, degraded=False) if not call.decision]
        assert len(denied) > 2 * WORKERS
        assert self.load.passed(SPENT) == 0
        assert abs(self._full() - self._full_at) < DAY / 2

    def check_nothing_lost(self) -> None:
        """Denials spent nothing, and exactly the capacity passed, less what calls without an answer may have spent."""
        self.check_denials_spent_nothing()
        passed, alone = self.load.passed(), len(self.load.of(HOT, degraded=True))
        assert CAPACITY - alone <= passed <= CAPACITY

    def check_fresh_key(self) -> None:
        """A key that is new allows exactly the capacity."""
        decisions = [self.limiter.check("fresh") for _ in range(CAPACITY + 50)]
        alone = sum(decision.degraded for decision in decisions)
        assert not (alone and self._patient)
        passed = sum(bool(decision) for decision in decisions if not decision.degraded)
        assert CAPACITY - alone <= passed <= CAPACITY


@contextmanager
def fault_trial(url: str, kind: str, policy: str = "local", timeout: float = PATIENCE) -> Iterator[FaultTrial]:
    """A store with one key that has been used up."""
    one = FaultTrial(url, policy, kind, timeout)
    try:
        one.exhaust()
        yield one
    finally:
        one.close()
