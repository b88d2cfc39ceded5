"""One attempt at a hold, compiled: from what a caller gives to the store's answer, and to the handle."""

from abc import abstractmethod
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from headgate import _hold_async
from headgate._hold_hot import Hold, age_of, keep_of, lease_of
from headgate.errors import HeadgateError, HoldError, StoreError, refuse
from headgate.hold_owner import HoldOwner
from headgate.limits.decision import Decision, Outcome
from headgate.limits.fixed import BLOCKED
from headgate.limits.numbers import microseconds
from headgate.limits.violations import Standing
from headgate.stores.base import Ask, Offence, ServerStore, Verb
from headgate.stores.holds import DENIED, HoldAnswer, HoldTerms
from headgate.stores.memory import in_process
from headgate.wait_queue import WaitQueues, acquire, is_zero

_LONGEST_ID: Final = 200

AnyHold = TypeVar("AnyHold", bound=Hold)


class HoldAttempt(Generic[AnyHold]):
    """Asks a store for a hold, once or until it is granted."""

    def __init__(
        self,
        owner: HoldOwner,
        asks: tuple[Ask, ...],
        terms: HoldTerms,
        max_age: object,
        *,
        own_id: bool,
    ) -> None:
        """`own_id`: nobody else knows the id."""
        self._owner = owner
        self._store: Final = owner.hold_store
        self.asks = asks
        self._terms = terms
        self.own_id: Final = own_id
        self._max_age: Final = None if max_age is None else age_of(max_age)
        self._called = 0
        self._answer: HoldAnswer | None = None
        self._unanswered = False  # whether a server was asked that didn't answer: it may have granted the hold
        self.offence: Offence | None = None
        """Whose advised wait is enforced."""
        self.kept_waiting = False
        """Whether it was denied only because others stood before it in line until its time was up."""

    @property
    def hold_id(self) -> str:
        """The id, as the store knows it."""
        return self._terms.hold_id

    @property
    def repeated(self) -> bool:
        """Whether there was a hold with the same id already."""
        return self._answer is not None and self._answer.repeated

    @property
    def groups(self) -> tuple[str, ...]:
        """The groups of the line in which it waits."""
        return ()

    @property
    def waits(self) -> bool:
        """Whether it may have to wait: not if it is granted whatever is left."""
        return not self._terms.forced

    def ask(self) -> Decision:
        denial = self._denial()
        if denial is not None:
            return denial
        try:
            return self._note(self._store.hold(*self._arguments()))
        except HeadgateError:
            raise
        except BaseException:  # of a signal's handler: KeyboardInterrupt, or Celery's soft time limit
            if self._may_be_unknown():
                self._give_back()
            raise

    def run(self, queues: WaitQueues, key: str, timeout: object) -> AnyHold:
        """Ask for the hold, and with a timeout wait for it in the line of a key."""
        if not self.may_wait(timeout):
            return self._finish(self.ask())
        clock, groups = self._store.clock, self.groups
        try:
            decision = acquire(queues, key, clock, timeout, self.perform, recheck=True, groups=groups)
        except BaseException:
            if self.may_be_granted():
                self._give_back()
            raise
        return self._finish(decision)

    def arun(self, queues: WaitQueues, key: str, timeout: object) -> Coroutine[Any, Any, AnyHold]:
        return _hold_async.run(self, queues, key, timeout)

    def may_wait(self, timeout: object) -> bool:
        """Whether it stands in line for so long. A timeout that can't be one is refused."""
        if (type(timeout) is int and timeout == 0) or is_zero(timeout):  # the first for speed: that is the default
            return False
        if timeout is not None:
            microseconds("timeout", timeout)
        return self.waits

    def perform(self, verb: Verb) -> Decision:
        """A step of `acquire`."""
        if verb is Verb.CHECK:
            return self.ask()
        denial = self._denial()
        return self.peeked(self._store.apply(verb, self.asks, self._owner.low)) if denial is None else denial

    def peeked(self, decision: Decision) -> Decision:
        self.kept_waiting = bool(decision)
        return decision

    def aperform(self, verb: Verb) -> Coroutine[Any, Any, Decision]:
        return _hold_async.perform(self, verb)

    def _denial(self) -> Decision | None:
        """A denial by something other than the limits, for which the store need not be asked."""
        denial = self._begin()
        if denial is None and self.offence is not None:
            denial = self.denial_until(self._store.standing(self.offence))
        return denial

    def _begin(self) -> Decision | None:
        """Called before the store is asked. A decision is that of something other than the limits."""
        memory = in_process(self._store)
        self._called = self._store.clock.now() if memory is None else memory.now()  # which is quicker
        return None

    def denial_until(self, standing: Standing) -> Decision | None:
        """A denial, if the advised wait isn't over."""
        wait = round(standing.wait_left * 1_000_000)
        return Decision(Outcome.DENY, BLOCKED, 0, wait, 0, -1) if wait else None

    def _arguments(self) -> tuple[tuple[Ask, ...], int, HoldTerms]:
        return self.asks, self._owner.low, self._terms

    def _note(self, answer: HoldAnswer) -> Decision:
        """The decision on whether to go on waiting."""
        self._answer = answer
        decision = answer.decision
        if decision.degraded:
            self._unanswered = True
        return decision if decision or answer.state == DENIED else decision.as_shadow()  # forced: it is granted

    def _finish(self, decision: Decision) -> AnyHold:
        """The hold on which this was the last decision. One that a server may have made all the same is given back."""
        hold = self._handle(decision)
        if not hold and self.may_be_granted():
            self._give_back()
        return hold

    def _give_back(self) -> None:
        with suppress(HoldError, StoreError):
            self._store.settle(*self._cancellation(), cancel=True)

    def _handle(self, decision: Decision) -> AnyHold:
        answer = self._answer
        if answer is None or answer.state == DENIED:
            parts = answer.parts if answer is not None and answer.decision is decision else ()
            answer = HoldAnswer(decision, DENIED, tuple([ask.cost for ask in self.asks]), 0, parts)
        hold = self._made(answer, self._terms)
        hold._release = answer.release if answer.repeated else self._terms.release
        return hold

    @abstractmethod
    def _made(self, answer: HoldAnswer, terms: HoldTerms) -> AnyHold:
        """The handle of what a store has answered."""

    def may_be_granted(self) -> bool:
        """Whether a server that didn't answer may grant, or have granted, a hold that is denied here."""
        return self._unanswered and self._may_be_unknown()

    def _may_be_unknown(self) -> bool:
        """Whether there may be a hold on a server that nobody has a handle of: its id was given to nobody."""
        return self.own_id and isinstance(self._store, ServerStore)

    def _cancellation(self) -> tuple[tuple[Ask, ...], int, str, tuple[int, ...]]:
        return self.asks, self._owner.low, self._terms.hold_id, (0,) * len(self.asks)


class LimiterAttempt(HoldAttempt[Hold]):
    """One attempt at a hold of a limiter."""

    def _made(self, answer: HoldAnswer, terms: HoldTerms) -> Hold:
        return Hold(self._owner, self.asks, terms.hold_id, terms.lease, answer, self._called, self._max_age)


def read_terms(hold_id: str, lease: object, on_expiry: object, keep: object) -> HoldTerms:
    """The terms of a hold, from what a caller gives."""
    if on_expiry not in ("keep", "release"):
        refuse("hold on_expiry", "'keep' or 'release'", on_expiry)
    return HoldTerms(hold_id, lease_of(lease), on_expiry == "release", keep_of(keep))


def check_id(hold_id: object) -> str:
    """The id of a hold, if it can be one."""
    if not isinstance(hold_id, str) or not 0 < len(hold_id) <= _LONGEST_ID:
        refuse("hold_id", f"1 to {_LONGEST_ID} characters", hold_id)
    return hold_id
