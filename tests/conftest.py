"""Settings and fixtures for all tests."""

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings

from headgate import Gate, ManualClock, MemoryStore, Policy, workers
from tests.support.redis_store import StoreWithoutChangeLog
from tests.support.valkey import PATIENCE, ValkeyServer
from tests.support.verbs import Verbs
from tests.support.wrapped_store import WrappedStore

# Decisions don't depend on the speed of the machine, so examples have no deadline.
settings.register_profile("headgate", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("headgate"), max_examples=25)
settings.register_profile("long", settings.get_profile("headgate"), max_examples=1000)
settings.register_profile("campaign", settings.get_profile("headgate"), max_examples=20_000)
settings.load_profile("headgate")


# A shell lets what it starts in the background ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test in its `runner`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = inspect.signature(pyfuncitem.obj).parameters
    runner: Any = pyfuncitem.funcargs["runner"]
    runner.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in arguments}))
    return True


@pytest.fixture(autouse=True, scope="session")
def _tests_are_no_workers() -> Iterator[None]:
    """Processes that test at the same time count for themselves, and that is no news."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "has_siblings", lambda: False)
        yield


@pytest.fixture(autouse=True)
def runner() -> Iterator[asyncio.Runner]:
    """Runs the test if it is a coroutine, and what its fixtures have to await; makes no event loop otherwise."""
    runner = asyncio.Runner()
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def _logging_is_left_alone() -> Iterator[None]:
    """Fail a test that leaves the log's settings changed."""
    root = logging.getLogger()
    before = (root.level, [*root.handlers])
    yield
    assert (root.level, root.handlers) == before


@pytest.fixture
def _frequent_switches() -> Iterator[None]:
    """Let threads interrupt each other as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server for the tests of one file."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server for one test, which may end it or let it lose everything."""
    with ValkeyServer() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    """A clock that only the test advances."""
    return ManualClock(start=1000)


@pytest.fixture(params=["memory", "wrapped", "redis"])
def store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[Any]:
    """A store on the test's clock."""
    if request.param == "redis":
        server: ValkeyServer = request.getfixturevalue("redis_server")
        with StoreWithoutChangeLog(server.url, prefix=f"test-{uuid4().hex}:", clock=clock, timeout=PATIENCE) as store:
            yield store
    else:
        yield MemoryStore(clock=clock) if request.param == "memory" else WrappedStore(clock=clock)


@pytest.fixture
def gate(store: Any) -> Gate:
    return Gate(Policy(), store=store)


@pytest.fixture(params=["", "a"], ids=["sync", "async"])
def verb(request: pytest.FixtureRequest) -> Verbs:
    """Look up a method of a limiter, gate, session or store: itself, or its async twin run in a loop."""

    def find(thing: Any, name: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(thing, request.param + name)
        if not request.param:
            return method

        async def run(*args: Any, **options: Any) -> Any:
            return await method(*args, **options)

        return lambda *args, **options: asyncio.run(run(*args, **options))

    return find
