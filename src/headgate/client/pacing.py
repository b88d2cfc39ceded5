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

Under a policy that counts tokens, as servers of language models have, a request costs what the caller expects of it, or
else what requests have cost lately: that is an estimate, where all else is exact. See `_PolicyState`.

Times are whole microseconds. So are amounts: a request, or a token, costs as much as the policy's window is long.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from headgate.http import DatedLimit, QuotaPolicy, RateLimitHeaders, ServiceLimit
from headgate.http.headers import CONCURRENT

SECOND: Final = 1_000_000
PROMPT: Final = SECOND
"""Within this time a request is judged, though its answer may take longer."""
LONGEST: Final = 86_400 * SECOND
"""The longest wait that a server is obeyed for: after that, it is asked again."""
Tokens: TypeAlias = int | Mapping[str, int] | None
"""The expected cost of a request under policies that count tokens: under all, or under some by name."""
_DEFAULT_WINDOW: Final = 60 * SECOND  # where the server doesn't state the window, nor a longer wait
_USUAL_WINDOWS: Final = (60 * SECOND, 3600 * SECOND, 86_400 * SECOND)  # of buckets that don't state theirs
_COSTS: Final = 10  # recent requests, or groups of concurrent ones, by which the cost of the next is estimated
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
    tokens: Tokens = None
    """Its expected cost, if the caller knows."""
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

    def earliest(self, now: int, tokens: Tokens = None) -> tuple[int, str]:
        """When the next request may be sent if no answer comes until then, and why not earlier.

        A moment that isn't after `now` means at once. `tokens` is its expected cost where tokens are counted.
        """
        when, why = self._closed_until, "the server asked to wait"
        free = self._next_in_flight()
        if free > when:
            when, why = free, "the first answers tell how much may be sent"
        for (name, _), policy in self._policies.items():
            free = policy.earliest(now, tokens)
            if free > when:
                left = "too little is left" if policy.unit == "tokens" else "nothing is left"
                when, why = free, f"{left} under {name!r}" if name else left
        return when, why

    def hopeless(self, now: int, end: int, tokens: Tokens = None) -> bool:
        """Whether the request can't be sent until `end`, whatever the answers to those in flight."""
        return self.earliest(now, tokens)[0] > end and (self._closed_until > end or not self._in_flight)

    def send(self, now: int, tokens: Tokens = None) -> SentRequest:
        """Note that a request is sent."""
        self._sequence += 1
        sent = SentRequest(self._sequence, now, tokens)
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
                quota = quotas.get((limit.name, limit.partition))
                if quota is not None and quota.unit == CONCURRENT:
                    continue  # what is in flight comes back when it ends, not with time: only a denial asks to wait
                policy = self._policy(limit)
                sent.policies += (policy,)
                empty = not limit.remaining or (sent.denied and limit in binding)
                policy.learn(sent, now, limit, quota, empty, jitter, reversed(self._sent))
                policy.learn_cost(sent, now, limit, len(self._in_flight))
        self._forget_judged(now)
        if sent.denied or (status == 503 and headers.retry_after is not None):
            self._wait(now, max([_us(headers.retry_after or 0), *map(self._stated_wait, binding)]), jitter)
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
        policy = self._policies.pop(key, None) or _PolicyState(limit.name)
        if len(self._policies) >= _MOST_POLICIES:
            del self._policies[next(iter(self._policies))]
        self._policies[key] = policy  # the most recent is last
        return policy

    def _stated_wait(self, limit: ServiceLimit) -> int:
        """The wait that an exhausted limit asks for. What a bucket states may be the time until it is full again."""
        policy = self._policies.get((limit.name, limit.partition))
        return 0 if limit.reset is None or (policy is not None and policy.fills) else _wait_of(limit)

    def _wait(self, now: int, stated: int, jitter: float) -> None:
        """Send nothing for so long; where the server states no wait, longer with each denial."""
        wait = stated or min(SECOND << self._denials, _MOST_BACKOFF)
        self._denials = 0 if stated else min(self._denials + 1, 10)
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
    """The state of one policy of a server.

    The cost of a request is 1. If the policy counts tokens, it is estimated: as what the caller expects, or else as the
    highest of what recent requests have cost, which the falling remainder tells; what others spend under the same
    policy counts as theirs. A bucket also gains between two requests, as much as between the moments of sending: if the
    second took longer to arrive, the estimate is a little too low, and a request may be denied that was sent at the
    first moment. Requests in flight at the same time can't be told apart: their average counts. The first
    response tells the quota that is lacking, so its request has cost no more; at least one request is sent while
    anything is left. No cost is estimated at more than the quota, so every request is sent at the latest when all of
    that is back.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.unit = "requests"
        self._estimates: list[_Estimate] = []
        self._quota, self._window = 1, _DEFAULT_WINDOW
        self._steady = False  # it fills as a bucket does
        self.fills = False  # and the stated time is always that until it is full: the latest response has shown it
        self._mark: tuple[int, int] | None = None  # an earlier remaining quota, and the time until all was back
        self._costs: deque[int] = deque(maxlen=_COSTS)
        self._first_cost = 1  # until there is one of those
        self._before: tuple[int, int, int] | None = None  # a remaining quota, its moment, and that of its reset
        self._sent_before = 0  # requests that were in flight then; it may include them or not
        self._sent_since = 0  # requests that were sent since then
        self._lowest = 0  # the lowest remaining quota since then

    def earliest(self, now: int, tokens: Tokens) -> int:
        cost = self.cost(tokens)
        return max((estimate.earliest(now, self._steady, cost) for estimate in self._estimates), default=0)

    def cost(self, tokens: Tokens) -> int:
        """The expected cost of a request, in units of the policy; `tokens` is what the caller expects."""
        if self.unit != "tokens":
            return 1
        expected = tokens.get(self._name) if isinstance(tokens, Mapping) else tokens
        if expected is None:
            expected = max(self._costs, default=self._first_cost)
        return max(expected, 1)

    def spend(self, sent: SentRequest) -> None:
        self._sent_since += 1
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
        late = now - since if isinstance(limit, DatedLimit) else 0
        reset = None if limit.reset is None else _wait_of(limit) + late
        self._learn_rate(sent, limit, quota, reset, since)
        if self.unit not in ("requests", "tokens") and not empty:
            return  # the cost of a request in that unit isn't known, and some is left
        if self.fills:
            empty = False  # the next passes long before the stated time, when all is back
        wait = self._window if reset is None else reset
        if empty and reset is None:
            wait = -(-self._window // self._quota)
        unseen = []
        for one in log:
            if one.at + PROMPT <= sent.at:
                break
            if one is not sent and not one.denied and self not in one.policies and not one.certainly_before(sent):
                unseen.append(one)
        amount = 0 if empty else limit.remaining * self._window
        again = since + wait + int(wait * jitter)
        self._add(_Estimate(self, sent, amount, self._quota, self._window, since, again, empty, unseen[::-1]))

    def learn_cost(self, sent: SentRequest, now: int, limit: ServiceLimit, in_flight: int) -> None:
        """Learn what requests cost under a policy that counts tokens."""
        if self.unit != "tokens":
            return
        if sent.denied:
            self._sent_since = max(self._sent_since - 1, 0)
            return
        if self._before is None:
            self._lowest = limit.remaining
            self._first_cost = min(self._quota - limit.remaining, limit.remaining)
        else:
            before, since, again = self._before
            self._lowest = min(self._lowest, limit.remaining)
            if sent.at < since:
                return
            counted = self._sent_since - in_flight
            countable = counted >= max(2 * (in_flight + self._sent_before), 1)
            if in_flight and not countable:
                return  # too many requests may be included or not
            if self._steady:
                before = min(before + (sent.at - since) * self._quota // self._window, self._quota)
            elif sent.at >= again + PROMPT:
                before, self._lowest = self._quota, limit.remaining
            if countable and before > self._lowest:  # which includes all that were answered: rather too high a cost
                self._costs.append(-(-(before - self._lowest) // counted))
        start = now if isinstance(limit, DatedLimit) else sent.at
        again = start + (self._window if limit.reset is None else _wait_of(limit))
        self._before = self._lowest, sent.at, again
        self._sent_before, self._sent_since = in_flight, 0

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

    def _learn_rate(
        self, sent: SentRequest, limit: ServiceLimit, quota: QuotaPolicy | None, reset: int | None, since: int
    ) -> None:
        """Note unit, quota and window, and find out whether the limit is a bucket that fills steadily.

        A bucket that lacks n tokens is full after n refill intervals, so each request lengthens the time until it is
        full; with a window that time only shrinks, or stays the same.
        """
        stated = None
        if quota is not None:
            self.unit, stated = quota.unit, quota.window
        most = max(quota.quota if quota is not None else self._quota, limit.remaining, 1)
        window = self._window if stated is None else max(_us(stated), SECOND)
        if (most, window) != (self._quota, self._window):
            self._quota, self._window, self._steady, self.fills, self._mark = most, window, False, False, None
        if stated is None and reset is not None and (sent.denied or not self._learn_window(limit, reset, since)):
            self._window = max(self._window, reset)
        if sent.denied or reset is None or stated is None:
            return
        lacking = most - limit.remaining if limit.remaining else 1
        if not (lacking - 1) * window < reset * most < lacking * window + SECOND * most:
            self._steady, self._mark = False, None
        elif limit.remaining:
            if self._mark is None or limit.remaining >= self._mark[0]:
                self._mark = limit.remaining, reset
            elif reset > self._mark[1] + SECOND:
                self._steady = True

    def _learn_window(self, limit: ServiceLimit, reset: int, since: int) -> bool:
        """Find out whether the limit is a bucket that fills in one of the usual windows. True if the figures fit that.

        The moment of its reset moves away before it is reached, which that of a window doesn't. Moments are exact to
        3 seconds, with all that may be rounded.
        """
        most, lacking = self._quota, self._quota - limit.remaining
        rounded = 2 * SECOND if isinstance(limit, DatedLimit) else SECOND
        fitting = [one for one in _USUAL_WINDOWS if abs(reset * most - lacking * one) <= rounded * most]
        if not fitting or (self._steady and self._window not in fitting):
            self._steady, self.fills, self._mark = False, False, None
            return False
        moment = since + reset
        if self._mark is None or limit.remaining >= self._mark[0]:
            self._mark = limit.remaining, moment
        elif since < self._mark[1] < moment - 3 * SECOND:  # so far away that no other window fits
            self._window, self._steady, self.fills = fitting[0], True, True
        return True


@dataclass(eq=False, slots=True)
class _Estimate:
    """The statement of one response about a policy, carried forward to the present."""

    policy: _PolicyState
    sent: SentRequest
    amount: int
    """The remaining quota, of at most `most`: a unit of it takes `window`, and each microsecond brings `rate`."""
    rate: int
    window: int
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
        return self.rate * self.window

    def merged(self, newer: "_Estimate") -> "_Estimate":
        """An estimate that allows no more than either of two."""
        return _Estimate(
            self.policy,
            max(self.sent, newer.sent, key=lambda sent: sent.number),
            min(self.amount * newer.window // self.window, newer.amount),
            newer.rate,
            newer.window,
            max(self.since, newer.since),
            max(self.again, newer.again),
            self.empty or newer.empty,
            sorted({*self.unseen, *newer.unseen}, key=lambda sent: sent.number),
        )

    def earliest(self, now: int, steady: bool, units: int) -> int:
        """When the next request, which costs so many units, may be sent, if no answer comes until then."""
        self._settle(now, steady)
        cost = min(units * self.window, self.most)
        if steady:
            amount, since = self.amount, self.since
            for one in self.unseen:
                if one.at > since:
                    amount, since = min(self.most, amount + (one.at - since) * self.rate), one.at
                amount -= self._cost(one)
            free = since + self._until(amount, cost)
            return max(free, self.again) if self.empty else free
        unseen = sum(map(self._cost, self.unseen))
        if now >= self.again:
            self._gain(now, steady, cost)
        elif self.empty or self.amount - unseen < cost:
            late = sum(self._cost(one) for one in self.unseen if self._matters(one, self.again))
            return self.again + self._until(cost - late, cost)
        free = self.since + self._until(self.amount - unseen, cost)
        if unseen + cost > self.most:  # even a full quota doesn't cover both: only an answer, or the lack of one, helps
            free = max(free, min(now + PROMPT, *map(self._matters_until, self.unseen)))
        return free

    def _settle(self, now: int, steady: bool) -> None:
        """Take off requests that were certainly judged by now and won't be reported, for a bucket at the earliest."""
        kept = []
        for one in self.unseen:
            if one.denied:
                continue  # it was charged nothing
            if self._matters(one, now):
                kept.append(one)
            else:
                cost = self._cost(one)
                self._gain(one.at if steady else one.at + PROMPT, steady, cost)
                self.amount = max(self.amount - cost, 0)  # what was more than that has been denied
        self.unseen = kept

    def _cost(self, one: SentRequest) -> int:
        return min(self.policy.cost(one.tokens) * self.window, self.most)

    def _matters(self, one: SentRequest, now: int) -> bool:
        """Whether it may still be judged, or be answered before a whole window has passed."""
        return self._matters_until(one) > now

    def _matters_until(self, one: SentRequest) -> int:
        return one.at + PROMPT + (0 if one.done else self.window)

    def _gain(self, now: int, steady: bool, cost: int) -> None:
        start = self.since
        if not steady:
            if self.since < self.again <= now:
                self.amount = max(self.amount, cost)
            start = max(start, self.again)
        if now > start:
            self.amount = min(self.most, self.amount + (now - start) * self.rate)
        self.since = max(self.since, now)

    def _until(self, amount: int, cost: int) -> int:
        return max(-((amount - cost) // self.rate), 0)


def _wait_of(limit: ServiceLimit) -> int:
    """The wait until the reset. A moment in whole seconds may have been rounded down."""
    return _us(limit.reset or 0) + (SECOND if isinstance(limit, DatedLimit) else 0)


def _us(seconds: float) -> int:
    return min(round(seconds * SECOND), LONGEST)
