"""A store under load while something is done to its server: what callers were told, how long they waited.

Threads, or tasks of an event loop, check two keys over and over. One key is being used up; the other has been before,
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
LIMIT = TokenBucket(CAPACITY, 1, DAY)  # none comes back while a test runs

IMPATIENT = 1.0
"""The timeout of a store whose server is held up: some calls wait for it in vain, and a slow machine may do the rest.

Where a fault is an error, the store is patient: then whatever is degraded is so because of the fault.
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


class Load:
    """Workers that check both keys over and over until the block is left, and what they were told."""

    def __init__(self, limiter: Limiter, kind: str) -> None:
        self.calls: list[Call] = []
        self.errors: list[BaseException] = []
        self.clean = Moment(math.inf, math.inf)
        """When full service was seen again."""
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
        except BaseException as error:  # noqa: BLE001 - that there are none is what is tested
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

    # What was seen ---------------------------------------------------------------------------------------------------

    def of(self, key: str, *, degraded: bool) -> list[Call]:
        return [call for call in list(self.calls) if call.key == key and call.decision.degraded is degraded]

    def passed(self, key: str = HOT) -> int:
        """How many the server let pass."""
        return len(self._passed[key])

    def degraded(self) -> list[Call]:
        return [call for call in list(self.calls) if call.decision.degraded]

    def used_up(self) -> bool:
        return not all(call.decision for call in self.of(HOT, degraded=False))

    def longest(self) -> float:
        return max(call.ended.own - call.began.own for call in self.calls)

    # What is waited for ----------------------------------------------------------------------------------------------

    def ration(self) -> None:
        """From now on the workers spend no more than is asked for by `spends`, and what they are just about to."""
        self._ration = self.passed()

    def spends(self, tokens: int) -> None:
        """Wait until the server has let some more pass, or all that there were: some may be lost with an answer."""
        goal = self.passed() + tokens
        if self._ration < math.inf:
            self._ration = goal
        self._wait(lambda: self.passed() >= goal or self.used_up(), f"{goal} that pass")

    def goes_without(self, seconds: float) -> None:
        """Wait until both keys have been decided without the server over some time."""
        began = time.monotonic()
        self._wait(lambda: self._without(began, began + seconds), f"degraded decisions for {seconds} s")

    def _without(self, since: float, until: float) -> bool:
        keys = {call.key for call in self.degraded() if call.began.real >= since}
        return keys == {HOT, SPENT} and time.monotonic() >= until

    def works_again(self, since: Moment) -> None:
        """Wait until nobody has been degraded for as many calls as all workers make in two rounds."""
        calls = 4 * WORKERS
        self._wait(lambda: self._clean(since, calls), "full service")
        self.clean = self.moment()

    def _clean(self, since: Moment, count: int) -> bool:
        last = self.calls[-count:]
        return all(call.began.real >= since.real and not call.decision.degraded for call in last)

    def uses_up(self) -> None:
        """Wait until the server denies the key that is being used up."""
        self._ration = math.inf
        self._wait(self.used_up, "the end of the tokens")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_for(lambda: self.errors or condition(), what)
        assert self.errors == []


class Trial:
    """A store under load, and whether it did what it should."""

    def __init__(self, url: str, policy: str, kind: str, timeout: float) -> None:
        self.store = RedisStore(url, on_failure=policy, timeout=timeout)
        self.limiter = Limiter(LIMIT, store=self.store)
        self.load = Load(self.limiter, kind)
        self.events: list[Degraded] = []
        self._policy = policy
        self._timeout = timeout
        self._sure = RedisStore(url, timeout=PATIENCE)  # to look with
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
        """The moment at which all tokens will be back."""
        decision = Limiter(LIMIT, store=self._sure).peek(SPENT)
        assert (decision.degraded, decision.remaining) == (False, 0)
        return time.monotonic() + decision.reset_after

    def close(self) -> None:
        self.store.close()
        self._sure.close()

    # What holds after every fault ------------------------------------------------------------------------------------

    def nobody_was_harmed(self) -> None:
        """No exception, no long wait, and without the server the policy that was chosen."""
        assert self.load.errors == []
        waits = 0.0 if self._patient else 2 * self._timeout  # for the call before one's own, and for that
        assert self.load.longest() < waits + SLACK
        for key in (HOT, SPENT):
            alone = self.load.of(key, degraded=True)
            expected = {"open": len(alone), "closed": 0, "local": min(len(alone), CAPACITY)}[self._policy]
            assert sum(bool(call.decision) for call in alone) == expected

    def it_was_degraded_until(self, back: Moment) -> None:
        """The server was seen to be away, was not missed for long after it was back, and listeners heard of both."""
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

    def denials_were_free(self) -> None:
        """Each that had been charged would have put the refill off by a day."""
        denied = [call for call in self.load.of(SPENT, degraded=False) if not call.decision]
        assert len(denied) > 2 * WORKERS
        assert self.load.passed(SPENT) == 0
        assert abs(self._full() - self._full_at) < DAY / 2

    def nothing_was_lost(self) -> None:
        """The capacity passed in all; less only what may have been charged in a call that brought no answer."""
        passed, alone = self.load.passed(), len(self.load.of(HOT, degraded=True))
        assert CAPACITY - alone <= passed <= CAPACITY

    def a_fresh_key_is_exact(self) -> None:
        decisions = [self.limiter.check("fresh") for _ in range(CAPACITY + 50)]
        alone = sum(decision.degraded for decision in decisions)
        assert not (alone and self._patient)
        passed = sum(bool(decision) for decision in decisions if not decision.degraded)
        assert CAPACITY - alone <= passed <= CAPACITY


@contextmanager
def trial(url: str, kind: str, policy: str = "local", timeout: float = PATIENCE) -> Iterator[Trial]:
    """A store with one key that has been used up; what it did can be asked until the block is left."""
    one = Trial(url, policy, kind, timeout)
    try:
        one.exhaust()
        yield one
    finally:
        one.close()
