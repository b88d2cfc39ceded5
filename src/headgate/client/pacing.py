"""What a client knows of a server's limits, and when it may send the next request. No input or output happens here.

Responses say what is left, but they are late and come in any order: what one says was true when its request was judged,
somewhere between its sending and its answer, and requests that were under way then may or may not be counted in it.
So what is known is kept as *words*: one for each response that might be the latest. A word counts as spent all that was
sent and isn't surely in it, and a request is sent when every word of every policy has one left for it.

One request is *surely before* another if it was answered before the other was sent, or sent a second before it: servers
judge a request when it comes in, however long its answer takes then.

Between responses a word gains as the server's limit does. Of a bucket that fills steadily, which shows in the figures
of several responses, it gains from the moment of the word on; of anything else, such as a window that begins anew,
nothing before the moment that the server has named, and from there on at the policy's rate. That is never more than is
safe to assume: the next response says more.

Times are whole microseconds, and so is what is left: a request costs as much as a policy's window is long.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

from headgate.http.headers import Left, Quota, Told

SECOND: Final = 1_000_000
PROMPT: Final = SECOND
"""Within this a request is judged, though its answer may take longer."""
LONGEST: Final = 86_400 * SECOND
"""No wait that a server names is believed for longer: it is asked again then."""
_UNTOLD: Final = 60 * SECOND  # a window of which isn't told how long it is, unless a longer wait is
_MOST_POLICIES: Final = 32  # of one server; more are not remembered
_MOST_SENT: Final = 10_000  # of which is remembered when they were sent; what older ones say isn't listened to
_MOST_BACKOFF: Final = 60 * SECOND  # between requests that are turned away without a word on how long to wait
_ABREAST: Final = 64  # requests at once after which a server that names no figures is trusted again


class Sent:
    """A request that was sent."""

    __slots__ = ("answered", "at", "denied", "done", "number", "told")

    def __init__(self, number: int, at: int) -> None:
        self.number = number
        """Its place among all that happened with this server."""
        self.at = at
        self.answered: int | None = None
        """The place of its answer among all that happened."""
        self.done = False
        """Whether it was answered or has failed."""
        self.denied = False
        self.told: tuple[_Policy, ...] = ()
        """The policies that its answer spoke of."""

    def surely_before(self, other: "Sent") -> bool:
        """Whether the server judged this one first, whatever the network did."""
        return (self.answered is not None and self.answered < other.number) or self.at + PROMPT <= other.at


class Pace:
    """What is known of one server: what it has left for this client, and when to send the next request.

    >>> from headgate.http.headers import Left, Quota, Told
    >>> pace = Pace()
    >>> first = pace.send(now=0)
    >>> pace.answer(first, 0, 200, Told((Quota("default", 10, 10),), (Left("default", 0, 1),)))
    False
    >>> pace.earliest(now=0)
    (1000000, "nothing is left under 'default'")

    It is told of every request: `send`, and then `answer` or `fail`. It knows no clock: `now` never goes back.
    """

    def __init__(self) -> None:
        self._happened = 0
        self._sent: deque[Sent] = deque()  # what may matter to those under way, in order
        self._under_way: dict[int, Sent] = {}
        self._policies: dict[tuple[str, bytes | None], _Policy] = {}
        self._closed_until = 0
        self._refusals = 0  # in a row, without a word on how long to wait
        self._abreast: int | None = 1  # how many may be under way while nothing is known; None: any number
        self._abreast_since: int | None = None
        self._wary = False  # it has turned away without naming figures

    def earliest(self, now: int) -> tuple[int, str]:
        """When the next request may be sent if nothing else is heard until then, and why not before.

        Not after `now`: at once.
        """
        when, why = self._closed_until, "the server asked to wait"
        held, reason = self._uncertain(), "the first answers tell how much may be sent"
        if held > when:
            when, why = held, reason
        for (name, _), policy in self._policies.items():
            free = policy.earliest(now)
            if free > when:
                when, why = free, f"nothing is left under {name!r}" if name else "nothing is left"
        return when, why

    def hopeless(self, now: int, end: int) -> bool:
        """Whether no request can be sent up to a moment, whatever those that are under way are answered."""
        return self.earliest(now)[0] > end and (self._closed_until > end or not self._under_way)

    def send(self, now: int) -> Sent:
        """Note that a request is sent."""
        self._happened += 1
        sent = Sent(self._happened, now)
        self._sent.append(sent)
        self._under_way[sent.number] = sent
        if self._abreast_since is None:
            self._abreast_since = now
        for policy in self._policies.values():
            policy.spend(sent)
        return sent

    def fail(self, sent: Sent, now: int) -> None:
        """Note that no answer will come. Whether and when the server has counted it isn't known, so it counts here."""
        sent.done = True
        del self._under_way[sent.number]
        self._clear(now)

    def answer(self, sent: Sent, now: int, status: int, told: Told, stretch: float = 0.0) -> bool:
        """Learn from a response: its status, and what its headers say. Whether it was sent away, to come back later.

        `stretch` is the share by which the waits in it are lengthened, so that those who are told the same at the same
        moment don't all come back at the same moment.
        """
        self._happened += 1
        sent.answered, sent.done, sent.denied = self._happened, True, status == 429
        del self._under_way[sent.number]
        quotas = {(quota.name, quota.partition): quota for quota in told.policies}
        binding = [left for left in told.left if not left.remaining] or (told.left if len(told.left) == 1 else [])
        if self._sent and self._sent[0].number <= sent.number:  # else it comes too late to tell anything
            for left in told.left:
                policy = self._policy(left)
                sent.told += (policy,)
                empty = not left.remaining or (sent.denied and left in binding)
                quota = quotas.get((left.name, left.partition))
                policy.learn(sent, now, left, quota, empty, stretch, reversed(self._sent))
        self._clear(now)
        if sent.denied or (status == 503 and told.retry_after is not None):
            self._wait(now, max([told.retry_after or 0, *(left.reset or 0 for left in binding)]), stretch)
            if not told.left:  # then how many may follow has to be found out, with few at first
                self._abreast, self._abreast_since, self._wary = 1, self._closed_until, True
            return True
        self._refusals = 0
        if self._abreast is not None:  # where the server names no figures, each that passes lets one more go
            self._abreast = None if told.left or not self._wary or self._abreast >= _ABREAST else self._abreast + 1
        return False

    def at_rest(self, now: int) -> bool:
        """Whether it may be forgotten: nothing is under way, and nothing has to be waited for."""
        return not self._under_way and self.earliest(now)[0] <= now

    def _policy(self, left: Left) -> "_Policy":
        key = (left.name, left.partition)
        policy = self._policies.pop(key, None) or _Policy()
        if len(self._policies) >= _MOST_POLICIES:
            del self._policies[next(iter(self._policies))]
        self._policies[key] = policy  # the one spoken of last is last
        return policy

    def _wait(self, now: int, seconds: int, stretch: float) -> None:
        """Send nothing for so long; where the server has named no time, longer with each time that it does so."""
        wait = _us(seconds) or min(SECOND << self._refusals, _MOST_BACKOFF)
        self._refusals = 0 if seconds else min(self._refusals + 1, 10)
        self._closed_until = max(self._closed_until, now + wait + int(wait * stretch))

    def _uncertain(self) -> int:
        """When one more may be under way. With every second of silence it is twice as many."""
        if self._abreast is None or len(self._under_way) < self._abreast or self._abreast_since is None:
            return 0
        doublings = (len(self._under_way) // self._abreast).bit_length()
        return self._abreast_since + doublings * PROMPT

    def _clear(self, now: int) -> None:
        """Forget what was surely judged before all that is under way, and before all that will be."""
        oldest = next(iter(self._under_way.values()), Sent(self._happened + 1, now))
        while self._sent and (self._sent[0].surely_before(oldest) or len(self._sent) > _MOST_SENT):
            self._sent.popleft()


class _Policy:
    """What is known of one policy of a server."""

    def __init__(self) -> None:
        self._words: list[_Word] = []
        self._quota, self._window = 1, _UNTOLD
        self._steady = False  # it fills as a bucket does
        self._mark: tuple[int, int] | None = None  # what was left once, and after how long all would be back

    def earliest(self, now: int) -> int:
        return max((word.earliest(now, self._steady) for word in self._words), default=0)

    def spend(self, sent: Sent) -> None:
        for word in self._words:
            word.unseen.append(sent)

    def learn(
        self, sent: Sent, now: int, left: Left, quota: Quota | None, empty: bool, stretch: float, log: Iterable[Sent]
    ) -> None:
        """Take in what a response says. `log` is what was sent lately, the latest first."""
        for word in self._words:  # what it says of itself is said here
            word.unseen = [one for one in word.unseen if one is not sent]
        self._words = [word for word in self._words if not word.sent.surely_before(sent)]
        if any(sent.surely_before(word.sent) for word in self._words):
            return  # there is later news
        since = min(now, sent.at + PROMPT)
        self._take_figures(sent, left, quota)
        if quota is not None and quota.unit != "requests" and not empty:
            return  # what a request costs of it isn't known; it isn't used up
        wait = self._window if left.reset is None else _us(left.reset)
        if empty and left.reset is None:
            wait = -(-self._window // self._quota)
        unseen = []
        for one in log:
            if one.at + PROMPT <= sent.at:
                break
            if one is not sent and not one.denied and self not in one.told and not one.surely_before(sent):
                unseen.append(one)
        amount = 0 if empty else left.remaining * self._window
        again = since + wait + int(wait * stretch)
        self._add(_Word(sent, amount, self._quota, self._window, since, again, empty, unseen[::-1]))

    def _add(self, new: "_Word") -> None:
        """Add a word, in place of those that allow more by all that is known."""
        kept = []
        for word in self._words:
            if new.amount <= word.amount and new.since >= word.since and new.empty >= word.empty:
                if new.empty == word.empty:  # else the moments are of different things
                    new.again = max(new.again, word.again)
            else:
                kept.append(word)
        self._words = [*kept, new]

    def _take_figures(self, sent: Sent, left: Left, quota: Quota | None) -> None:
        """Note quota and window, and find out whether the limit is a bucket that fills steadily.

        A bucket that lacks n is full after n times what one takes, so with each request it takes longer until all is
        back; of a window it takes ever shorter, or always the same.
        """
        most = max(quota.quota if quota is not None else self._quota, left.remaining, 1)
        told = quota.window if quota is not None else None
        window = max(self._window, _us(left.reset or 0)) if told is None else max(_us(told), SECOND)
        if (most, window) != (self._quota, self._window):
            self._quota, self._window, self._steady, self._mark = most, window, False, None
        if sent.denied or left.reset is None or told is None:
            return
        lacking = most - left.remaining if left.remaining else 1
        reset = _us(left.reset)
        if not (lacking - 1) * window < reset * most < lacking * window + SECOND * most:
            self._steady, self._mark = False, None
        elif left.remaining:
            if self._mark is None or left.remaining >= self._mark[0]:
                self._mark = left.remaining, reset
            elif reset > self._mark[1] + SECOND:
                self._steady = True


class _Word:
    """What one response said of a policy, carried on to the present."""

    __slots__ = ("again", "amount", "cost", "empty", "most", "rate", "sent", "since", "unseen")

    def __init__(
        self, sent: Sent, amount: int, quota: int, window: int, since: int, again: int, empty: bool, unseen: list[Sent]
    ) -> None:
        self.sent = sent
        self.amount = amount
        """What is left: a request takes `cost`, and each microsecond brings `rate`."""
        self.cost, self.rate, self.most = window, quota, quota * window
        self.since = since
        """The moment of which `amount` is true."""
        self.again = again
        """The moment that the server has named: from then on there is more."""
        self.empty = empty
        """Whether nothing at all passes before that."""
        self.unseen = unseen
        """What was sent and may not be in it, in order; what was surely judged meanwhile is in `amount`."""

    def earliest(self, now: int, steady: bool) -> int:
        """When there is one left, if nothing else is heard."""
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
        """Count what has surely been judged by now and won't be heard of, for a bucket at its earliest moment."""
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

    def _matters(self, one: Sent, now: int) -> bool:
        """Whether it may still be judged, or be heard of before a whole window has passed."""
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
