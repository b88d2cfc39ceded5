"""Forked processes: stores, wait queues and request ids of a child are its own, whatever the parent was doing."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

PROGRAM = """
import os, signal, sys, threading, time
from headgate import AllOf, Gate, Limiter, ManualClock, MemoryStore, Policy, SlidingWindow, per_day
from headgate.stores.base import Verb

sys.setswitchinterval(1e-6)

def fork(then):
    '''Whether `then()` is true in a child, within a time that bears a slow machine.'''
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if then() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def run(*works):
    '''Repeat works in threads.'''
    def repeat(work):
        while True:
            work()
    for work in works:
        threading.Thread(target=repeat, args=[work], daemon=True).start()

"""


def output(steps: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + steps], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


STORES = """
limits = per_day(10**6), SlidingWindow(10**5, 0.01), AllOf([per_day(10**6), SlidingWindow(10**5, 0.01)])
store = MemoryStore()
limiters = [Limiter(limit, store=store) for limit in limits]
windows = store.windows()
clock = ManualClock()

def hit():
    try:
        windows.hit("key", 10**6, 10_000).send(None)
    except StopIteration as end:
        return end.value.allowed

def use(limiter):
    return [
        limiter.check("key"),
        limiter.check("key", request_id=str(time.monotonic_ns())),
        limiter.acquire("key", timeout=1),
        limiter.refund("key"),
        hit(),
    ]

def use_all():
    clock.advance(0.001)
    Limiter(per_day(time.monotonic_ns() % 1000 + 1), store=store)
    return all(all(use(limiter)) for limiter in limiters for _ in range(5))

run(*[lambda limiter=limiter: use(limiter) for limiter in limiters], use_all)
print([fork(use_all) for _ in range(15)].count(True))
os._exit(0)
"""


def test_a_child_can_use_the_stores_that_the_parents_threads_are_using() -> None:
    assert output(STORES) == "15"


NESTED = """
import tempfile
from headgate.lifecycle import new_lock

gate = Gate(Policy(), remember=os.path.join(tempfile.mkdtemp(), "changes.db"))
inner = new_lock()
outer = new_lock()
whole = []

def change():
    gate.set_override("planner", "heavy", f"{time.monotonic_ns() % 100 + 1}/minute")

def nest():
    with outer:
        whole.append(False)
        with inner:
            time.sleep(0)
        whole.pop()

run(change, nest)
print([fork(lambda: not whole and not gate.set_override("a", "light", "1/minute")) for _ in range(10)].count(True))
os._exit(0)
"""


def test_a_fork_waits_until_nested_locks_are_free() -> None:
    """The lock of a whole is taken before those of its parts: else the parent would wait for its own thread."""
    assert output(NESTED) == "10"


WAITING = """
clock = ManualClock()
limiter = Limiter(per_day(1), store=MemoryStore(clock=clock))
limiter.check("a")
threading.Thread(target=limiter.acquire, args=["a"], daemon=True).start()
while not limiter.waiting("a"):
    time.sleep(0.001)

def acquire():
    '''The parent's waiter is not in line here.'''
    alone = limiter.waiting("a") == 0 and not limiter.acquire("a", timeout=0)
    return alone and limiter.reset("a") and limiter.acquire("a")

print(fork(acquire), limiter.waiting("a"))
os._exit(0)
"""


def test_a_child_has_no_waiters() -> None:
    assert output(WAITING) == "True 1"


IDS = """
limiter = Limiter(per_day(10))
limiter.check("a", request_id="before")

def check():
    again, new = limiter.check("a", request_id="before"), limiter.check("a", request_id="in the child")
    return (again.remaining, new.remaining) == (9, 8)

print(fork(check), limiter.check("a", request_id="in the child").remaining)
"""


def test_the_request_ids_of_a_child_are_its_own() -> None:
    assert output(IDS) == "True 8"


HELD = """
from headgate.lifecycle import new_lock
free, held, taken = new_lock(), new_lock(), threading.Event()

def hold():
    held.acquire()
    taken.set()
    time.sleep(60)

threading.Thread(target=hold, daemon=True).start()
taken.wait()
free.acquire()

def release():
    free.release()  # it was held before the fork by the thread that forked
    return free.acquire(timeout=1) and held.acquire(timeout=1)

print(fork(release))
os._exit(0)
"""


def test_a_lock_that_never_becomes_free_delays_a_fork_only_for_a_while() -> None:
    assert output(HELD) == "True"


INTERRUPTED = """
class SoftTimeLimitExceeded(BaseException):
    pass

def interrupted(*_):
    raise SoftTimeLimitExceeded

older, newer = Limiter(per_day(1)), Limiter(per_day(1))
held, over = threading.Event(), threading.Event()

def hold():
    with older.store._lock:
        held.set()
        over.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
signal.signal(signal.SIGALRM, interrupted)
signal.setitimer(signal.ITIMER_REAL, 0.2)  # the fork waits for a second
child = fork(lambda: older.check("a") and newer.check("a"))
over.set()
passed = []
thread = threading.Thread(target=lambda: passed.append(bool(newer.check("a"))), daemon=True)
thread.start()
thread.join(10)
print(child, passed)
os._exit(0)
"""


def test_a_signal_during_a_fork_leaves_no_lock_behind() -> None:
    assert output(INTERRUPTED) == "True [True]"


IN_USE = """
import tempfile
from headgate.gate.changes import exemption
from headgate.stores.base import Change
from headgate.stores.sqlite import ChangeLogError, SqliteChangeLog

log = SqliteChangeLog(tempfile.mkdtemp() + "/changes.db")
taken, forked, waited = threading.Event(), threading.Event(), []

def use():
    with log._lock:
        taken.set()
        waited.append(not forked.wait(30))

user = threading.Thread(target=use, daemon=True)
user.start()
taken.wait()

def refused():
    try:
        log.read()
    except ChangeLogError as error:
        return fork(refused_again) and "restart this process" in str(error)

def refused_again():
    try:
        log.write(Change((exemption("a"),)))
    except ChangeLogError:
        log.close()
        return True

print(fork(refused))
forked.set()
user.join()
print(waited, log.write(Change((exemption("a"),))), fork(lambda: log.read().position == 1))
"""


def test_a_fork_does_not_wait_for_a_thread_that_uses_the_change_log_for_long() -> None:
    """The child can't have a connection beside the parent's, which it can't close; so it says that it has none."""
    assert output(IN_USE).splitlines() == ["True", "[False] 1 True"]


GENERATION = """
from headgate import RedisStore

generation = RedisStore("redis://127.0.0.1:1").generation
taken = threading.Event()

def see():
    with generation._lock:
        taken.set()
        time.sleep(60)

threading.Thread(target=see, daemon=True).start()
taken.wait()
print(fork(lambda: generation._lock.acquire(blocking=False)))
os._exit(0)
"""


def test_a_child_finds_the_generation_of_the_store_unlocked() -> None:
    assert output(GENERATION) == "True"
