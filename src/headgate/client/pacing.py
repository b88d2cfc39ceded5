"""A client's knowledge of a server's limits, and when it may send the next request. No I/O happens here.

Responses report the remaining quota, but late and in any order: each was true when its request was judged, somewhere
between sending and answer, and may or may not include the requests that were in flight then. So there is one *estimate*
for each response that might be the latest. An estimate counts as spent every request that it doesn't certainly include,
and a request is sent when every estimate of every policy has quota left for it.

One request is *certainly before* another if it was answered before the other was sent, or sent a second earlier:
servers judge a request when it arrives, however long the answer takes.

Between responses an estimate gains as the server's limit does. A bucket that fills steadily, which shows in the figures
of several responses, gains from the moment of the estimate; anything else, such as a window that starts over, gains
nothing before the moment that the server has named, and from then on at the policy's rate. That is never more than is
safe to assume: the next response says more.

Times are whole microseconds. So are amounts: a request costs as much as the policy's window is long.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headgate.http import QuotaPolicy, RateLimitHeaders, ServiceLimit

SECOND: Final = 1_000_000
PROMPT: Final = SECOND
"""Within this time a request is judged, though its answer may take longer."""
LONGEST: Final = 86_400 * SECOND
"""The longest wait that a server is obeyed for: after that, it is asked again."""
_DEFAULT_WINDOW: Final = 60 * SECOND  # where the server doesn't state the window, nor a longer wait
_MOST_POLICIES: Final = 32  # of one server; more are not remembered
_MOST_ESTIMATES: Final = 8  # of one policy: what they cost is in proportion to each request in flight
_MOST_SENT: Final = 10_000  # requests that are remembered; answers to older ones are ignored
_MOST_BACKOFF: Final = 60 * SECOND  # between denials that state no wait
_MOST_CAUTIOUS: Final = 64  # requests in flight at which a server that states no figures is trusted again


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that was sent."""

    number: int
    """Its position in the sequence of all requests and answers of this server."""
    at: int
    answered: int | None = None
    """The position of its answer in the same sequence."""
    done: bool = False
    """Whether it was answered or has failed."""
    denied: bool = False
    policies: "tuple[_PolicyState, ...]" = ()
    """The policies that its answer reported on."""

    def certainly_before(self, other: "SentRequest") -> bool:
        """Whether the server judged this one first, whatever the network did."""
        return (self.answered is not None and self.answered < other.number) or self.at + PROMPT <= other.at


class Pace:
    """The state of one server's limits: the quota that is left for this client, and when to send the next request.

    >>> from headgate.http import QuotaPolicy, RateLimitHeaders, ServiceLimit
    >>> pace = Pace()
    >>> first = pace.send(now=0)
    >>> headers = RateLimitHeaders((QuotaPolicy("default", 10, 10),), (ServiceLimit("default", 0, 1),))
    >>> pace.answer(first, 0, 200, headers)
    False
    >>> pace.earliest(now=0)
    (1000000, "nothing is left under 'default'")

    Every request is reported: by `send`, and then by `answer` or `fail`. There is no clock: `now` never goes back.
    """

    def __init__(self) -> None:
        self._sequence = 0
        self._sent: deque[SentRequest] = deque()  # those that may matter to requests in flight, in order
        self._in_flight: dict[int, SentRequest] = {}
        self._policies: dict[tuple[str, bytes | None], _PolicyState] = {}
        self._closed_until = 0
        self._denials = 0  # in a row, without a stated wait
        self._most_in_flight: int | None = 1  # while nothing is known; None: any number
        self._limited_since: int | None = None
        self._cautious = False  # the server has denied without stating figures

    def earliest(self, now: int) -> tuple[int, str]:
        """When the next request may be sent if no answer comes until then, and why not earlier.

        A moment that isn't after `now` means at once.
        """
        when, why = self._closed_until, "the server asked to wait"
        free = self._next_in_flight()
        if free > when:
            when, why = free, "the first answers tell how much may be sent"
        for (name, _), policy in self._policies.items():
            free = policy.earliest(now)
            if free > when:
                when, why = free, f"nothing is left under {name!r}" if name else "nothing is left"
        return when, why

    def hopeless(self, now: int, end: int) -> bool:
        """Whether no request can be sent until `end`, whatever the answers to those in flight."""
        return self.earliest(now)[0] > end and (self._closed_until > end or not self._in_flight)

    def send(self, now: int) -> SentRequest:
        """Note that a request is sent."""
        self._sequence += 1
        sent = SentRequest(self._sequence, now)
        self._sent.append(sent)
        self._in_flight[sent.number] = sent
        if self._limited_since is None:
            self._limited_since = now
        for policy in self._policies.values():
            policy.spend(sent)
        return sent

    def fail(self, sent: SentRequest, now: int) -> None:
        """Note that no answer will come. The server may have counted the request, so it counts here."""
        sent.done = True
        del self._in_flight[sent.number]
        self._forget_judged(now)

    def answer(self, sent: SentRequest, now: int, status: int, headers: RateLimitHeaders, jitter: float = 0.0) -> bool:
        """Learn from a response: its status and headers. True if the request was denied and may be sent again later.

        `jitter` is the share by which the stated waits are lengthened, so that clients with the same wait don't all
        come back at the same moment.
        """
        self._sequence += 1
        sent.answered, sent.done, sent.denied = self._sequence, True, status == 429
        del self._in_flight[sent.number]
        limits = headers.limits
        quotas = {(policy.name, policy.partition): policy for policy in headers.policies}
        binding = [limit for limit in limits if not limit.remaining] or (limits if len(limits) == 1 else [])
        if self._sent and self._sent[0].number <= sent.number:  # else the answer is too old to say anything
            for limit in limits:
                policy = self._policy(limit)
                sent.policies += (policy,)
                empty = not limit.remaining or (sent.denied and limit in binding)
                quota = quotas.get((limit.name, limit.partition))
                policy.learn(sent, now, limit, quota, empty, jitter, reversed(self._sent))
        self._forget_judged(now)
        if sent.denied or (status == 503 and headers.retry_after is not None):
            self._wait(now, max([headers.retry_after or 0, *(limit.reset or 0 for limit in binding)]), jitter)
            if not limits:  # how many may follow has to be found out, with few at first
                self._most_in_flight, self._limited_since, self._cautious = 1, self._closed_until, True
            return True
        self._denials = 0
        if self._most_in_flight is not None:  # while the server states no figures, each that passes allows one more
            trusted = limits or not self._cautious or self._most_in_flight >= _MOST_CAUTIOUS
            self._most_in_flight = None if trusted else self._most_in_flight + 1
        return False

    def idle(self, now: int) -> bool:
        """Whether it may be forgotten: nothing is in flight, and no wait is due."""
        return not self._in_flight and self.earliest(now)[0] <= now

    def _policy(self, limit: ServiceLimit) -> "_PolicyState":
        key = (limit.name, limit.partition)
        policy = self._policies.pop(key, None) or _PolicyState()
        if len(self._policies) >= _MOST_POLICIES:
            del self._policies[next(iter(self._policies))]
        self._policies[key] = policy  # the most recent is last
        return policy

    def _wait(self, now: int, seconds: int, jitter: float) -> None:
        """Send nothing for so long; where the server states no wait, longer with each denial."""
        wait = _us(seconds) or min(SECOND << self._denials, _MOST_BACKOFF)
        self._denials = 0 if seconds else min(self._denials + 1, 10)
        self._closed_until = max(self._closed_until, now + wait + int(wait * jitter))

    def _next_in_flight(self) -> int:
        """When one more request may be in flight. With every second of silence twice as many may."""
        if self._most_in_flight is None or len(self._in_flight) < self._most_in_flight or self._limited_since is None:
            return 0
        doublings = (len(self._in_flight) // self._most_in_flight).bit_length()
        return self._limited_since + doublings * PROMPT

    def _forget_judged(self, now: int) -> None:
        """Forget requests that were certainly judged before all that are in flight, and before all to come."""
        oldest = next(iter(self._in_flight.values()), SentRequest(self._sequence + 1, now))
        while self._sent and (self._sent[0].certainly_before(oldest) or len(self._sent) > _MOST_SENT):
            self._sent.popleft()


class _PolicyState:
    """The state of one policy of a server."""

    def __init__(self) -> None:
        self._estimates: list[_Estimate] = []
        self._quota, self._window = 1, _DEFAULT_WINDOW
        self._steady = False  # it fills as a bucket does
        self._mark: tuple[int, int] | None = None  # an earlier remaining quota, and the time until all was back

    def earliest(self, now: int) -> int:
        return max((estimate.earliest(now, self._steady) for estimate in self._estimates), default=0)

    def spend(self, sent: SentRequest) -> None:
        for estimate in self._estimates:
            estimate.unseen.append(sent)

    def learn(
        self,
        sent: SentRequest,
        now: int,
        limit: ServiceLimit,
        quota: QuotaPolicy | None,
        empty: bool,
        jitter: float,
        log: Iterable[SentRequest],
    ) -> None:
        """Learn from a response. `log` holds recent requests, the latest first."""
        for estimate in self._estimates:  # the response to a request includes it
            estimate.unseen = [one for one in estimate.unseen if one is not sent]
        self._estimates = [estimate for estimate in self._estimates if not estimate.sent.certainly_before(sent)]
        if any(sent.certainly_before(estimate.sent) for estimate in self._estimates):
            return  # there is a later estimate
        since = min(now, sent.at + PROMPT)
        self._learn_rate(sent, limit, quota)
        if quota is not None and quota.unit != "requests" and not empty:
            return  # the cost of a request in that unit isn't known, and some is left
        wait = self._window if limit.reset is None else _us(limit.reset)
        if empty and limit.reset is None:
            wait = -(-self._window // self._quota)
        unseen = []
        for one in log:
            if one.at + PROMPT <= sent.at:
                break
            if one is not sent and not one.denied and self not in one.policies and not one.certainly_before(sent):
                unseen.append(one)
        amount = 0 if empty else limit.remaining * self._window
        again = since + wait + int(wait * jitter)
        self._add(_Estimate(sent, amount, self._quota, self._window, since, again, empty, unseen[::-1]))

    def _add(self, new: "_Estimate") -> None:
        """Add an estimate, in place of those that allow more in every respect."""
        kept = []
        for estimate in self._estimates:
            if new.amount <= estimate.amount and new.since >= estimate.since and new.empty >= estimate.empty:
                if new.empty == estimate.empty:  # else the two moments mean different things
                    new.again = max(new.again, estimate.again)
            else:
                kept.append(estimate)
        self._estimates = [*kept, new]
        if len(self._estimates) > _MOST_ESTIMATES:
            oldest, next_oldest, *others = self._estimates
            self._estimates = [oldest.merged(next_oldest), *others]

    def _learn_rate(self, sent: SentRequest, limit: ServiceLimit, quota: QuotaPolicy | None) -> None:
        """Note quota and window, and find out whether the limit is a bucket that fills steadily.

        A bucket that lacks n tokens is full after n refill intervals, so each request lengthens the time until it is
        full; with a window that time only shrinks, or stays the same.
        """
        most = max(quota.quota if quota is not None else self._quota, limit.remaining, 1)
        stated = quota.window if quota is not None else None
        window = max(self._window, _us(limit.reset or 0)) if stated is None else max(_us(stated), SECOND)
        if (most, window) != (self._quota, self._window):
            self._quota, self._window, self._steady, self._mark = most, window, False, None
        if sent.denied or limit.reset is None or stated is None:
            return
        lacking = most - limit.remaining if limit.remaining else 1
        reset = _us(limit.reset)
        if not (lacking - 1) * window < reset * most < lacking * window + SECOND * most:
            self._steady, self._mark = False, None
        elif limit.remaining:
            if self._mark is None or limit.remaining >= self._mark[0]:
                self._mark = limit.remaining, reset
            elif reset > self._mark[1] + SECOND:
                self._steady = True


@dataclass(eq=False, slots=True)
class _Estimate:
    """The statement of one response about a policy, carried forward to the present."""

    sent: SentRequest
    amount: int
    """The remaining quota, of at most `most`: a request takes `cost`, and each microsecond brings `rate`."""
    rate: int
    cost: int
    since: int
    """The moment at which `amount` is true."""
    again: int
    """The moment that the server has named: from then on there is more."""
    empty: bool
    """Whether nothing at all passes before that."""
    unseen: list[SentRequest]
    """Requests that `amount` may not include, in order; those certainly judged since are taken off it."""

    @property
    def most(self) -> int:
        return self.rate * self.cost

    def merged(self, newer: "_Estimate") -> "_Estimate":
        """An estimate that allows no more than either of two."""
        return _Estimate(
            max(self.sent, newer.sent, key=lambda sent: sent.number),
            min(self.amount * newer.cost // self.cost, newer.amount),
            newer.rate,
            newer.cost,
            max(self.since, newer.since),
            max(self.again, newer.again),
            self.empty or newer.empty,
            sorted({*self.unseen, *newer.unseen}, key=lambda sent: sent.number),
        )

    def earliest(self, now: int, steady: bool) -> int:
        """When the next request may be sent, if no answer comes until then."""
        self._settle(now, steady)
        if steady:
            amount, since = self.amount, self.since
            for one in self.unseen:
                if one.at > since:
                    amount, since = min(self.most, amount + (one.at - since) * self.rate), one.at
                amount -= self.cost
            free = since + self._until(amount)
            return max(free, self.again) if self.empty else free
        unseen = self.cost * len(self.unseen)
        if now >= self.again:
            self._gain(now, steady)
        elif self.empty or self.amount - unseen < self.cost:
            late = sum(self._matters(one, self.again) for one in self.unseen)
            return self.again + self._until(self.cost - self.cost * late)
        return self.since + self._until(self.amount - unseen)

    def _settle(self, now: int, steady: bool) -> None:
        """Take off requests that were certainly judged by now and won't be reported, for a bucket at the earliest."""
        kept = []
        for one in self.unseen:
            if one.denied:
                continue  # it was charged nothing
            if self._matters(one, now):
                kept.append(one)
            else:
                self._gain(one.at if steady else one.at + PROMPT, steady)
                self.amount -= self.cost
        self.unseen = kept

    def _matters(self, one: SentRequest, now: int) -> bool:
        """Whether it may still be judged, or be answered before a whole window has passed."""
        return one.at + PROMPT + (0 if one.done else self.cost) > now

    def _gain(self, now: int, steady: bool) -> None:
        start = self.since
        if not steady:
            if self.since < self.again <= now:
                self.amount = max(self.amount, self.cost)
            start = max(start, self.again)
        if now > start:
            self.amount = min(self.most, self.amount + (now - start) * self.rate)
        self.since = max(self.since, now)

    def _until(self, amount: int) -> int:
        return max(-((amount - self.cost) // self.rate), 0)


def _us(seconds: int) -> int:
    return min(seconds * SECOND, LONGEST)
