"""The thread that sends something to the server while there is anything to send."""

import threading
from collections import deque
from functools import partial

import pytest

from headgate.stores.redis.background_thread import BackgroundThread
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once


ENDED = -99
"""A letter that ends the thread."""


class Letters:
    """Letters that wait, and those that were sent."""

    def __init__(self, *, name: str = "letters", delay: float = 0.0) -> None:
        self.waiting: deque[int] = deque()
        self.sent: list[int] = []
        self.open = threading.Event()
        self.open.set()
        self.late: deque[int] = deque()
        """Letters that are added at the very moment at which the thread finds nothing."""
        self.every = 0.0
        self.restless = False
        """Whether the thread asks for itself to be started, as a finalizer that it runs may do."""
        self.thread = BackgroundThread(name, "letters", self._send, self._waits, delay=delay, pause=PATIENCE)

    def add(self, number: int) -> None:
        self.waiting.append(number)
        self.thread.start()

    def has_sent(self, count: int) -> bool:
        return len(self.sent) >= count

    def _waits(self) -> bool:
        found = bool(self.waiting)
        if not found and self.late and threading.current_thread().name == "letters":
            self.add(self.late.popleft())
        if self.restless and threading.current_thread().name == "letters":
            self.restless = False
            self.thread.start()
        return found

    def _send(self) -> float:
        self.open.wait(PATIENCE)
        if self.waiting[0] < 0:
            number = self.waiting.popleft()
            raise SystemExit if number == ENDED else ValueError(number)
        self.sent.append(self.waiting.popleft())
        return self.every


def threads() -> int:
    return sum(thread.name == "letters" for thread in threading.enumerate())


def test_it_runs_while_something_waits() -> None:
    letters = Letters()
    letters.thread.start()
    assert threads() == 0
    letters.open.clear()
    for number in range(10):
        letters.add(number)
    assert threads() == 1
    letters.open.set()
    wait_for(lambda: threads() == 0, "its end")
    assert letters.sent == list(range(10))
    letters.add(10)
    wait_for(lambda: letters.sent[-1] == 10, "the next one")


def test_nothing_is_left_that_was_added_as_it_ended() -> None:
    letters = Letters()
    letters.late.extend(range(1, 6))
    letters.add(0)
    wait_for(lambda: letters.sent == list(range(6)), "all of them")
    wait_for(lambda: threads() == 0, "the end of the last thread")


def test_it_waits_at_first_and_may_be_woken() -> None:
    letters = Letters(delay=10 * PATIENCE)
    letters.add(1)
    assert letters.sent == []
    letters.thread.wake()
    wait_for(lambda: letters.sent, "the letter")


def test_a_wake_is_for_one_call() -> None:
    letters = Letters(delay=10 * PATIENCE)
    letters.every = 10 * PATIENCE
    for number in range(100):
        letters.add(number)
    for calls in (1, 2):
        letters.thread.wake()
        wait_for(partial(letters.has_sent, calls), "the call")
    assert letters.sent == [0, 1]
    letters.thread.close()


def test_a_finalizer_in_the_thread_starts_no_other_beside_it() -> None:
    letters = Letters()
    letters.restless = True
    letters.open.clear()
    for number in range(3):
        letters.add(number)
    letters.every = 10 * PATIENCE
    letters.open.set()
    wait_for(lambda: not letters.restless, "the finalizer")
    wait_for(lambda: threads() == 1 and len(letters.sent) == 2, "one of the two")
    letters.thread.close()
    assert threads() == 0


def test_a_finalizer_as_it_starts_starts_no_other() -> None:
    class Name(str):
        """Starts the thread as `Thread` reads its name: a finalizer may do so wherever something is made."""

        calls = 0

        def __str__(self) -> str:
            Name.calls += 1
            if Name.calls == 1:
                letters.thread.start()
            return str.__str__(self)

    letters = Letters(name=Name("letters"))
    letters.open.clear()
    letters.add(1)
    assert (Name.calls, threads()) == (2, 1)
    letters.open.set()
    letters.thread.close()


def test_an_error_ends_it_not_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    letters = Letters()
    letters.open.clear()
    for number in (-1, -1, -2, 5, -2, 6):
        letters.add(number)
    letters.open.set()

    def attempts(number: int) -> bool:
        return len(letters.waiting) <= number

    for left in (5, 4, 3, 1):
        wait_for(partial(attempts, left), "the attempt")
        assert len(letters.waiting) == left, "after an error it pauses"
        letters.thread.wake()
    wait_for(lambda: letters.sent == [5, 6], "the last one")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["letters could not be sent to the store, and are tried again"] * 3, "again after one was sent"
    assert caplog.text.count("ValueError: -2") == 2


def test_one_that_can_not_be_started_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    letters = Letters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        letters.add(1)
    assert [record.getMessage() for record in caplog.records] == [
        "letters can't be sent to the store yet: can't start new thread"
    ]
    letters.thread.start()
    wait_for(lambda: letters.sent == [1], "the letter")


def test_a_closed_one_sends_nothing_more() -> None:
    letters = Letters(delay=10 * PATIENCE)
    letters.add(1)
    letters.thread.close()
    letters.add(2)
    assert (threads(), letters.sent) == (0, [])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_thread_does_not_end_its_work() -> None:
    """As gevent's timeouts do, which are no errors."""
    letters = Letters()
    letters.add(ENDED)
    wait_for(lambda: not threads(), "the end of the thread")
    letters.add(1)
    wait_for(partial(letters.has_sent, 1), "the next letter")
    letters.thread.close()
