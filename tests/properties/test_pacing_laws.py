"""Laws of pacing for any server, network and number of concurrent requests, on a simulated clock."""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate import Limiter, ManualClock, MemoryStore, SlidingWindow, TokenBucket, per_minute
from headgate.client.pacing import LONGEST, PROMPT, SECOND, Pace, SentRequest
from headgate.http import DatedLimit, QuotaPolicy, RateLimitHeaders, ServiceLimit, read_headers
from tests.support.rate_limit_headers import format_headers, headers_of

pytestmark = pytest.mark.once

MOST = min(settings().max_examples, 500)
"""Examples: each is a whole series of requests."""

Server = Callable[[int], RateLimitHeaders]
"""Decides on a request at a time in microseconds, and returns the headers, with Retry-After for a denial."""


@dataclass
class ForeignWindow:
    """The limit of a foreign server: a quota for each window, which returns all at once."""

    quota: int
    seconds: int
    begins: int
    draft: bool = True
    """Headers of the draft; else the triple, which doesn't state the window."""


Kind = TokenBucket | SlidingWindow | ForeignWindow


def serve(kind: Kind) -> Server:
    if isinstance(kind, ForeignWindow):
        return partial(decide_by_window, kind, Counter())
    clock = ManualClock()
    return partial(decide_by_limiter, Limiter(kind, store=MemoryStore(clock=clock)), clock)


def decide_by_limiter(limiter: Limiter, clock: ManualClock, now: int) -> RateLimitHeaders:
    clock.advance(Fraction(now - clock.now(), SECOND))
    return headers_of(limiter.check("a"), limiter.limit)


def decide_by_window(kind: ForeignWindow, counted: Counter[int], now: int) -> RateLimitHeaders:
    number, into = divmod(now - kind.begins, kind.seconds * SECOND)
    wait = -(-(kind.seconds * SECOND - into) // SECOND)
    policy = QuotaPolicy("theirs", kind.quota, kind.seconds) if kind.draft else QuotaPolicy("", kind.quota)
    if counted[number] == kind.quota:
        return RateLimitHeaders((policy,), (ServiceLimit(policy.name, 0, wait),), wait)
    counted[number] += 1
    return RateLimitHeaders((policy,), (ServiceLimit(policy.name, kind.quota - counted[number], wait),))


@dataclass
class Network:
    """Latencies of a network and of the server's answers, in microseconds."""

    seed: int
    longest_way: int = 0
    longest_answer: int = 0
    lost: float = 0.0
    """The share of requests whose answer never arrives."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def way(self) -> int:
        return self.chance.randint(0, self.longest_way)

    def answer(self) -> int:
        return self.chance.randint(self.longest_answer // 2, self.longest_answer)


class SimulatedClient:
    """Sends a number of requests, some of them concurrently, and records what happens."""

    def __init__(self, server: Server, network: Network, requests: int, abreast: int = 1, jitter: float = 0.0) -> None:
        self._server, self._network, self._jitter = server, network, jitter
        self._wanted = requests
        self._abreast = abreast
        self._pace = Pace()
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._number = count()  # of what happens at the same moment, what was set first is first
        self._asked_until = 0  # by a denial
        self._line = 0
        self._under_way = 0
        self.heard: list[int] = []
        self.sent: list[int] = []
        self.passed: list[int] = []
        self.in_vain: list[int] = []
        """Times of requests that were denied though an answer had arrived before."""
        self.early: list[int] = []
        """Times of requests that were sent before the end of a wait that the server had asked for."""

    def play(self) -> Self:
        requests, wake = self._wanted, -1
        self._at(0, lambda _: None)
        while len(self.passed) < requests:
            now, _, what = heapq.heappop(self._events)
            what(now)
            when = self._send(now)
            if when is not None and when != wake:
                wake = when
                self._at(when, lambda _: None)
        return self

    @property
    def took(self) -> float:
        """Seconds from the first request to the last."""
        return (self.sent[-1] - self.sent[0]) / SECOND

    def _at(self, moment: int, what: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._number), what))

    def _send(self, now: int) -> int | None:
        """Send what may be sent, and return the time to try again."""
        while self._wanted and self._line + self._under_way < self._abreast:
            self._wanted -= 1
            self._line += 1
        while self._line:
            when, _ = self._pace.earliest(now)
            if when > now:
                return when
            self._line -= 1
            self._under_way += 1
            if now < self._asked_until:
                self.early.append(now)
            self.sent.append(now)
            self._at(now + self._network.way(), partial(self._arrive, self._pace.send(now)))
        return None

    def _arrive(self, sent: SentRequest, now: int) -> None:
        said = read_headers(dict(format_headers(self._server(now), "both")))
        takes = self._network.answer() if said.retry_after is None else 0
        what = self._lose if self._network.chance.random() < self._network.lost else self._hear
        self._at(now + takes + self._network.way(), partial(what, sent, said))

    def _lose(self, sent: SentRequest, _: RateLimitHeaders, now: int) -> None:
        self._under_way -= 1
        self._pace.fail(sent, now)
        self.passed.append(sent.at)

    def _hear(self, sent: SentRequest, said: RateLimitHeaders, now: int) -> None:
        self._under_way -= 1
        status = 200 if said.retry_after is None else 429
        self._pace.answer(sent, now, status, said, self._jitter * self._network.chance.random())
        if said.retry_after is None:
            self.passed.append(sent.at)
        else:
            self._line += 1
            self._asked_until = max(self._asked_until, now + round(said.retry_after * SECOND))
            if self.heard and self.heard[0] < sent.at:
                self.in_vain.append(sent.at)
        self.heard.append(now)


MILLISECOND = SECOND // 1000

buckets = st.builds(
    TokenBucket, st.integers(1, 30), st.integers(1, 100), st.sampled_from([1, 2, 7, 10, 60, 3600])
).filter(lambda bucket: bucket.capacity * bucket.per / bucket.refill < 100_000)
sliding = st.builds(SlidingWindow, st.integers(1, 30), st.sampled_from([1, 2, 7, 10, 60, 3600]))
windows = st.builds(
    ForeignWindow, st.integers(1, 30), st.sampled_from([1, 2, 7, 10, 60, 3600]), st.integers(-3600 * SECOND, 0)
)
kinds = st.one_of(buckets, sliding, windows, windows.map(lambda kind: replace(kind, draft=False)))
networks = st.builds(
    Network,
    st.integers(0, 2**32),
    st.sampled_from([0, MILLISECOND, 40 * MILLISECOND, PROMPT // 2 - 1]),  # so that every answer is prompt
    st.sampled_from([0, 10 * MILLISECOND, 2 * SECOND, 20 * SECOND]),
)
requests = st.integers(1, 60)
abreasts = st.sampled_from([1, 2, 10, 200])
jitters = st.sampled_from([0.0, 0.03])


@pytest.mark.parametrize("abreast", [1, 50, 500])
@pytest.mark.parametrize(
    ("kind", "ideal"),
    [
        (per_minute(60), 440),
        (per_minute(60, burst=10), 490),
        (SlidingWindow(60, 60), 480),
        (ForeignWindow(60, 60, begins=0), 480),
        (ForeignWindow(60, 60, begins=0, draft=False), 480),
    ],
    ids=["60 a minute", "burst 10", "sliding", "window", "window, triple"],
)
def test_500_requests_at_60_a_minute_take_at_most_5_percent_too_long(kind: Kind, ideal: int, abreast: int) -> None:
    network = Network(7, longest_way=5 * MILLISECOND, longest_answer=5 * MILLISECOND)
    client = SimulatedClient(serve(kind), network, 500, abreast, jitter=0.03).play()
    assert len(client.sent) == 500, "no request was denied"
    assert ideal - 1 <= client.took <= ideal * 1.05


@settings(max_examples=MOST)
@given(kinds, networks, requests, abreasts, jitters)
def test_no_request_is_denied_after_the_first_answer(
    kind: Kind, network: Network, requests: int, abreast: int, jitter: float
) -> None:
    if isinstance(kind, SlidingWindow):  # the refill between late answers can only be guessed
        network.longest_answer = min(network.longest_answer, 10 * MILLISECOND)
    client = SimulatedClient(serve(kind), network, requests, abreast, jitter).play()
    assert (client.in_vain, client.early) == ([], [])


@settings(max_examples=MOST)
@given(
    st.one_of(
        st.builds(TokenBucket, st.integers(1, 30), st.just(1), st.integers(1, 60)),
        windows.map(lambda kind: replace(kind, begins=kind.begins // SECOND * SECOND - SECOND // 2)),
    ),
    st.builds(Network, st.integers(0, 2**32), st.just(MILLISECOND)),
    requests,
    abreasts,
)
def test_all_requests_pass_in_at_most_5_percent_more_than_the_ideal_time(
    kind: TokenBucket | ForeignWindow, network: Network, requests: int, abreast: int
) -> None:
    client = SimulatedClient(serve(kind), network, requests, abreast, jitter=0.03).play()
    if isinstance(kind, ForeignWindow):
        waits = (requests - 1) // kind.quota
        first = kind.seconds - -kind.begins % (kind.seconds * SECOND) / SECOND
        ideal = first + (waits - 1) * kind.seconds if waits else 0
        rounded = waits  # waits are stated in whole seconds
    else:
        ideal, rounded = max(requests - kind.capacity, 0) * float(kind.per), 1
    assert len(client.passed) == requests
    assert client.took <= (ideal + rounded) * 1.05 + requests * 3 * MILLISECOND / SECOND


@settings(max_examples=MOST)
@given(kinds, networks, st.sampled_from([0.0, 0.3]), st.integers(0, 30), requests, abreasts)
def test_waits_are_respected_and_all_requests_pass_despite_other_clients_and_losses(
    kind: Kind, network: Network, lost: float, others: int, requests: int, abreast: int
) -> None:
    server = serve(kind)
    spent = iter(range(others))

    def shared(now: int) -> RateLimitHeaders:
        for _ in zip(range(3), spent, strict=False):  # others were quicker
            server(now)
        return server(now)

    network.lost = lost
    client = SimulatedClient(shared, network, requests, abreast, jitter=0.03).play()
    assert len(client.passed) == requests
    assert client.early == []


figures = st.one_of(st.integers(0, 100), st.sampled_from([0, 1, 10**9, 999_999_999_999_999]))
names = st.sampled_from(["a", "b", ""])
resets = st.none() | figures | st.floats(0, 10**9)
quotas = st.builds(QuotaPolicy, names, figures, st.none() | figures, st.sampled_from(["requests", "bytes", "tokens"]))
anything = st.builds(
    RateLimitHeaders,
    st.lists(quotas, max_size=3).map(tuple),
    st.lists(
        st.builds(ServiceLimit, names, figures, resets) | st.builds(DatedLimit, names, figures, resets), max_size=3
    ).map(tuple),
    resets,
)
expected = st.one_of(st.none(), figures, st.dictionaries(names, figures))


answers = st.tuples(anything, st.sampled_from([200, 429, 503]), st.integers(0, 10**9))


@settings(max_examples=MOST)
@given(st.lists(answers, min_size=1, max_size=6), st.data())
def test_every_wait_ends_whatever_the_server_says(
    course: list[tuple[RateLimitHeaders, int, int]], data: st.DataObject
) -> None:
    pace, now = Pace(), 0
    waiting: list[SentRequest] = []
    for said, status, passes in course:
        waiting += [pace.send(now, data.draw(expected)) for _ in range(data.draw(st.integers(1, 3)))]
        now += passes
        sent = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        pace.answer(sent, now, status, said, jitter=0.03)
    began, tokens = now, data.draw(expected)
    for _ in range(1000):  # while others are in flight, a wait may be told in parts
        when, _ = pace.earliest(now, tokens)
        if when <= now:
            break
        now = when
    assert pace.earliest(now, tokens)[0] <= now
    assert now - began <= LONGEST * 2 * (len(waiting) + len(course))
