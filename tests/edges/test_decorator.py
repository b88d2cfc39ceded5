"""The decorator: whom a call counts for, what a denial says, and what is refused."""

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from flask import Flask

from headgate import HeadgateError, InvalidInput, Limiter, ManualClock, MemoryStore, RateLimited
from headgate.edges import limit_function
from headgate.edges.decorator import rate_limited, too_many_requests
from tests.support.event_loop import wait_until
from tests.support.valkey import wait_for

pytestmark = pytest.mark.once


def test_a_call_beyond_the_limit_raises_and_does_not_run(limiter: Limiter, clock: ManualClock) -> None:
    ran = []

    @rate_limited(limiter, key="agent_id")
    def send(agent_id: str, text: str = "hello") -> int:
        ran.append(text)
        return len(text)

    assert [send("bob") for _ in range(5)] == [5] * 5
    with pytest.raises(RateLimited) as denied:
        send("bob", "again")
    assert str(denied.value) == "rate limited: agent 'bob' at 5/minute, retry after 12000ms"
    assert (denied.value.agent_id, denied.value.limit, denied.value.retry_after_ms) == ("bob", 5 / 60, 12_000)
    assert ran == ["hello"] * 5
    assert send("ann") == 5
    clock.advance(12)
    assert send("bob", text="more") == 4


async def test_coroutine_functions_are_awaited_and_stay_coroutine_functions(limiter: Limiter) -> None:
    @rate_limited(limiter, key="agent")
    async def send(agent: str) -> str:
        await asyncio.sleep(0)
        return agent

    assert inspect.iscoroutinefunction(send)
    assert [await send("bob") for _ in range(5)] == ["bob"] * 5
    with pytest.raises(RateLimited, match="agent 'bob' at 5/minute"):
        await send("bob")


def test_a_decorated_function_keeps_its_signature_and_exposes_its_limiter() -> None:
    def send(agent: str, /, text: str, *, loud: bool = False) -> str:
        """Send it."""
        return text

    limited = rate_limited("5/day")(send)
    assert (limited.__name__, limited.__doc__) == ("send", "Send it.")  # type: ignore[attr-defined]
    assert inspect.signature(limited) == inspect.signature(send)
    limited("bob", text="x", loud=True)
    key = f"{__name__}.{send.__qualname__}"
    assert limited.limiter.peek(key).remaining == 4
    assert limited.limiter.reset(key)


def test_without_a_key_each_function_has_one_bucket(limiter: Limiter) -> None:
    def left() -> int:
        return 1

    def right() -> int:
        return 2

    one, other = rate_limited(limiter)(left), rate_limited(limiter)(right)
    assert [one() for _ in range(5)] == [1] * 5
    with pytest.raises(RateLimited, match=r"left' at 5/minute, retry after 12000ms"):
        one()
    assert other() == 2


def test_the_same_limit_counts_each_function_for_itself_and_the_same_limiter_joins_them(limiter: Limiter) -> None:
    def send(agent: str) -> str:
        return agent

    several = rate_limited("1/day", key="agent")
    apart, too = several(send), several(send)
    apart("bob")
    too("bob")
    assert apart.limiter is not too.limiter
    shared = rate_limited(limiter, key="agent")
    first, second = shared(send), shared(send)
    first("bob")
    second("bob")
    assert limiter.peek("bob").remaining == 3


class Account:
    def __init__(self, owner: str) -> None:
        self.owner = owner

    @rate_limited("2/day", key=lambda self, amount: self.owner)
    def pay(self, amount: int) -> int:
        return amount

    @rate_limited("2/day", key="who")
    async def ask(self, who: str) -> str:
        return who

    @classmethod
    @rate_limited("1/day", key="name")
    def named(cls, name: str) -> "Account":
        return cls(name)


def test_methods_are_limited_by_object_or_argument() -> None:
    bob, ann = Account("bob"), Account.named("ann")  # type: ignore[call-arg, arg-type] # mypy binds only plain ones
    assert [bob.pay(7), bob.pay(amount=8), ann.pay(9)] == [7, 8, 9]
    with pytest.raises(RateLimited, match="agent 'bob' at 2/day"):
        bob.pay(1)
    assert bob.pay.limiter is Account.pay.limiter
    assert asyncio.run(bob.ask("ann")) == "ann"
    assert bob.ask.limiter.peek("ann").remaining == 1
    with pytest.raises(RateLimited, match="agent 'ann' at 1/day"):
        Account.named(name="ann")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "call",
    [
        lambda function: function("bob", "x"),
        lambda function: function("bob", other="x"),
        lambda function: function(agent="bob", other="x"),
        lambda function: function(other="x", agent="bob"),
    ],
)
def test_a_parameter_is_found_however_it_is_passed(limiter: Limiter, call: Callable[..., object]) -> None:
    @rate_limited(limiter, key="agent")
    def send(agent: str, other: str = "") -> None: ...

    call(send)
    assert limiter.peek("bob").remaining == 4


def test_parameters_by_name_only_by_place_only_and_by_default(limiter: Limiter) -> None:
    @rate_limited(limiter, key="agent")
    def by_name(*rest: str, agent: str) -> None: ...

    @rate_limited(limiter, key="agent")
    def by_place(agent: str = "nobody", /, **rest: str) -> None: ...

    by_name("ann", "ann", agent="bob")
    by_place("bob", agent="eve")
    by_place(agent="eve")
    assert [limiter.peek(key).remaining for key in ("bob", "nobody", "ann", "eve")] == [3, 4, 5, 5]


def test_a_call_that_cannot_be_made_counts_nothing(limiter: Limiter) -> None:
    @rate_limited(limiter, key="agent")
    def send(agent: str, text: str) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'agent'"):
        send(text="x")  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match=r"rate_limited key: expected a string for each call.*, got 7"):
        send(7, "x")  # type: ignore[arg-type]
    assert len(limiter.store) == 0  # type: ignore[arg-type]


def test_long_keys_are_kept_short(limiter: Limiter) -> None:
    @rate_limited(limiter, key="agent")
    def send(agent: str) -> None: ...

    for _ in range(5):
        send("x" * 10_000)
    with pytest.raises(RateLimited, match=r"agent 'sha256:[0-9a-f]{64}' at"):
        send("x" * 10_000)


def test_a_call_may_cost_more(limiter: Limiter) -> None:
    @rate_limited(limiter, key=lambda *words: "all", cost=lambda *words: len(words))
    def say(*words: str) -> int:
        return len(words)

    assert say("one", "two", "three") == 3
    with pytest.raises(RateLimited, match="retry after 12000ms"):
        say("one", "two", "three")
    with pytest.raises(RateLimited, match="no wait would help"):
        say(*["word"] * 6)
    with pytest.raises(InvalidInput, match="cost: expected a whole number of at least 1, got 0"):
        say()
    assert limiter.peek("all").remaining == 2


def test_a_call_that_raises_stays_counted(limiter: Limiter) -> None:
    @rate_limited(limiter, key="agent")
    def fail(agent: str) -> None:
        raise ValueError(agent)

    with pytest.raises(ValueError, match="bob"):
        fail("bob")
    assert limiter.peek("bob").remaining == 4


def test_threads_wait_for_their_turn_up_to_the_timeout(limiter: Limiter, clock: ManualClock) -> None:
    done: list[object] = []

    @rate_limited(limiter, key="agent", wait=20)
    def send(agent: str) -> None:
        done.append(agent)

    def last() -> None:
        try:
            send("bob")
        except RateLimited as denied:
            done.append(denied.retry_after_ms)

    for _ in range(5):
        send("bob")
    threads = []
    for waiting in (1, 2):
        threads.append(threading.Thread(target=last))
        threads[-1].start()
        wait_for(lambda: limiter.waiting("bob") == waiting, "a thread that waits")  # noqa: B023
    clock.advance(12)
    wait_for(lambda: limiter.waiting("bob") == 1, "the first to pass")
    clock.advance(8)
    for thread in threads:
        thread.join()
    assert done == ["bob"] * 6 + [4000]


async def test_tasks_wait_for_their_turn(limiter: Limiter, clock: ManualClock) -> None:
    @rate_limited(limiter, key="agent", wait=20)
    async def send(agent: str) -> str:
        return agent

    async def joined() -> None:
        await wait_until(lambda: limiter.waiting("bob"), "the call to wait")

    for _ in range(5):
        await send("bob")
    waiting = asyncio.create_task(send("bob"))
    await joined()
    clock.advance(12)
    assert await waiting == "bob"
    cancelled = asyncio.create_task(send("bob"))
    await joined()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert limiter.waiting("bob") == 0


def test_many_tasks_and_threads_are_counted_exactly(limiter: Limiter) -> None:
    @rate_limited(limiter)
    async def send() -> None:
        await asyncio.sleep(0)

    async def use() -> list[object]:
        return await asyncio.gather(*(send() for _ in range(200)), return_exceptions=True)

    assert asyncio.run(use()).count(None) == 5


# What is refused ------------------------------------------------------------------------------------------------------


def plain(agent: str, *rest: str, **more: str) -> None: ...


def make_parts(agent: str) -> Iterator[str]:
    yield agent


async def async_make_parts(agent: str) -> AsyncIterator[str]:
    yield agent


async def async_plain(agent: str) -> str:
    return agent


class PartMaker:
    def __call__(self, agent: str) -> Iterator[str]:
        yield agent


class AsyncPartMaker:
    async def __call__(self, agent: str) -> AsyncIterator[str]:
        yield agent


class AsyncCallable:
    async def __call__(self, agent: str) -> str:
        return agent


class AsyncMethod(AsyncCallable):
    def __get__(self, instance: object, owner: type) -> "AsyncMethod":
        return self


def numbered(user: int) -> None: ...


LIMIT: dict[str, Any] = {"limit": "5/minute"}


@pytest.mark.parametrize(
    ("options", "function", "text"),
    [
        (LIMIT | {"key_func": plain}, plain, r"got 'key_func'; did you mean key=\? \(docs/coming-from.md lists"),
        (LIMIT | {"scope": "x"}, plain, r"got 'scope'; did you mean name=\?"),
        (LIMIT | {"per_method": True}, plain, r"got 'per_method'; put the method into the pattern of a route"),
        (LIMIT | {"kye": plain}, plain, r"got 'kye'; did you mean key=\?"),
        ({"limit": Limiter("5/minute"), "store": MemoryStore()}, plain, r"rate_limited store: expected none: a"),
        (LIMIT | {"store": MemoryStore()}, lambda: None, r"rate_limited name: expected a name in a store that others"),
        (LIMIT | {"name": 5}, plain, r"rate_limited name: expected a string, got 5"),
        ({"limit": Limiter("5/minute"), "name": "x"}, plain, r"rate_limited name: expected none: a limiter"),
        ({"limit": async_plain}, plain, r"rate_limited limit: expected a plain function, since the limited"),
        ({}, plain, r"rate_limited: expected one limit, got None"),
        ({"limit": 5}, plain, r"rate_limited limit: expected a limit such as '5/minute', or several, got 5"),
        ({"limit": "5 a minute"}, plain, r"expected 'COUNT/UNIT'"),
        (LIMIT | {"key": "user"}, plain, r"rate_limited key: expected a parameter of the function \(agent\)"),
        (LIMIT | {"key": "rest"}, plain, r"expected a parameter of the function \(agent\), got 'rest'"),
        (LIMIT | {"key": "x"}, lambda: None, r"expected a parameter of the function \(it has none\), got 'x'"),
        (LIMIT | {"key": "user"}, numbered, r"expected a parameter that is a string, or key=lambda ...: str\(user\)"),
        (LIMIT | {"key": 7}, plain, r"expected a plain function, or the name of a parameter, got 7"),
        (LIMIT | {"key": async_plain}, plain, r"expected a plain function, or the name of a parameter, got <function"),
        (LIMIT | {"key": AsyncCallable()}, plain, r"expected a plain function, or the name of a parameter, got <"),
        (LIMIT | {"key": functools.partial(AsyncCallable())}, plain, r"expected a plain function, or the name of"),
        (LIMIT | {"key": make_parts}, plain, r"expected a plain function, or the name of a parameter, got <"),
        (LIMIT | {"cost": AsyncCallable()}, plain, r"cost: expected a whole number of at least 1, got <"),
        (LIMIT | {"cost": 0}, plain, r"cost: expected a whole number of at least 1, got 0"),
        (LIMIT | {"cost": async_plain}, plain, r"cost: expected a whole number of at least 1, got <function async"),
        (LIMIT | {"wait": -1}, plain, r"rate_limited wait: expected a number of seconds, 0 or more, got -1"),
        (LIMIT | {"wait": "5"}, plain, r"rate_limited wait: expected a number of seconds, 0 or more, got '5'"),
        (LIMIT, functools.lru_cache(make_parts), r"rate_limited: expected a function, or a generator function itself"),
        (LIMIT, functools.partial(functools.cache(async_make_parts), "bob"), r"a generator function itself"),
        (LIMIT, PartMaker(), r"a generator function itself"),
        (LIMIT, functools.partial(PartMaker(), "bob"), r"a generator function itself"),
        (LIMIT, functools.partial(AsyncPartMaker(), "bob"), r"a generator function itself"),
        (LIMIT, functools.lru_cache(AsyncPartMaker()), r"a generator function itself"),
        (LIMIT, staticmethod(plain), r"expected a function: put it below @staticmethod"),
        (LIMIT, classmethod(lambda cls: None), r"expected a function: put it below @classmethod"),
        (LIMIT, Account, r"expected a function or method, got <class"),
        (LIMIT, "plain", r"expected a function or method, got 'plain'"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_when_decorating(options: dict[str, Any], function: Any, text: str) -> None:
    decorate: Any = rate_limited
    with pytest.raises(InvalidInput, match=text):
        decorate(**options)(function)


def test_a_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"rate_limited: expected a limit in parentheses, such as @rate_limited"):
        rate_limited(plain)  # type: ignore[call-overload]


def limit_of_plan(agent: str, *_: object) -> str:
    return {"ann": "3/minute", "bob": "1/minute"}[agent]


async def async_limit_of_plan(agent: str) -> str:
    return limit_of_plan(agent)


def test_a_limit_can_depend_on_the_arguments(clock: ManualClock) -> None:
    @rate_limited(limit=limit_of_plan, key="agent", store=MemoryStore(clock=clock))
    def ask(agent: str, question: str = "") -> str:
        return f"{agent} asks"

    assert [ask("ann") for _ in range(3)] == ["ann asks"] * 3
    assert ask("bob", "why?") == "bob asks"
    for agent, pace in (("ann", "3/minute"), ("bob", "1/minute")):
        with pytest.raises(RateLimited, match=f"agent '{agent}' at {pace}"):
            ask(agent)
    clock.advance(60)
    assert ask("bob") == "bob asks"
    with pytest.raises(KeyError):
        ask("eve")
    assert ask("ann") == "ann asks"


async def test_a_limit_that_depends_on_the_arguments_may_be_awaited(clock: ManualClock) -> None:
    @rate_limited(limit=async_limit_of_plan, key="agent", store=MemoryStore(clock=clock))
    async def ask(agent: str) -> str:
        return f"{agent} asks"

    assert await ask("bob") == "bob asks"
    with pytest.raises(RateLimited, match="agent 'bob' at 1/minute"):
        await ask("bob")


async def test_a_limit_function_that_never_returns_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit_function, "_FUNCTION_SECONDS", 0.01)

    async def hang() -> str:
        await asyncio.Event().wait()
        return "1/minute"

    @rate_limited(limit=hang)
    async def ask() -> None: ...

    with pytest.raises(HeadgateError, match=r"rate_limited limit: expected a function that returns within 0\.01 s"):
        await ask()


def test_functions_with_a_name_count_together(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)
    one = rate_limited("1/minute", store=store, name="both", key=lambda: "k")(lambda: 1)
    two = rate_limited("1/minute", store=store, name="both", key=lambda: "k")(lambda: 2)
    assert one() == 1
    with pytest.raises(RateLimited):
        two()


def test_functions_with_the_same_limit_in_one_store_count_apart(clock: ManualClock) -> None:
    store = MemoryStore(clock=clock)

    @rate_limited("1/minute", key="agent", store=store)
    def ask(agent: str) -> None: ...

    @rate_limited("1/minute", key="agent", store=store)
    def tell(agent: str) -> None: ...

    ask("bob")
    tell("bob")
    for function in (ask, tell):
        with pytest.raises(RateLimited):
            function("bob")


def test_other_callables_are_taken_too(limiter: Limiter) -> None:
    asynchronous: list[Callable[..., Any]] = [
        AsyncCallable(),
        functools.partial(AsyncCallable()),
        functools.partial(functools.partial(AsyncCallable().__call__)),
        functools.cache(AsyncCallable()),
        AsyncMethod(),
    ]
    for number, function in enumerate(asynchronous):
        send = rate_limited(limiter, key=lambda agent: agent)(function)
        assert inspect.iscoroutinefunction(send)
        assert asyncio.run(send("bob")) == "bob"
        assert limiter.peek("bob").remaining == 4 - number
    assert rate_limited("5/minute")(functools.partial(max, 3))(4) == 4
    assert rate_limited("5/minute")(functools.partial(functools.lru_cache(max), 3))(4) == 4
    assert rate_limited("5/minute", key="agent")(AsyncCallable()).limiter.peek("bob").remaining == 5


def test_what_has_no_name_of_its_own_needs_a_key_under_a_shared_limiter(limiter: Limiter) -> None:
    class MailSender:
        def __call__(self) -> int:
            return 1

        @classmethod
        def of_all(cls) -> int:
            return 1

        def of_one(self) -> int:
            return 1

    class AsyncSender:
        async def __call__(self) -> int:
            return 1

    named = functools.update_wrapper(functools.partial(max, 3, 4), max)
    nameless: dict[str, list[Callable[..., object]]] = {
        "a partial has no name": [functools.partial(max, 3, 4), named],
        "a lambda has no name": [lambda: 1, (lambda: lambda: 1)()],
        "the bound methods of all objects have one name": [MailSender().of_one, MailSender.of_all, [].copy],
        "the objects of a class have no names": [MailSender(), AsyncSender()],
    }
    for reason, functions in nameless.items():
        text = (
            rf"rate_limited key: expected one under a shared limiter, such as key=lambda \*_: 'mail', as {reason}, got"
        )
        for function in functions:
            with pytest.raises(InvalidInput, match=text):
                rate_limited(limiter)(function)
            rate_limited("5/minute")(function)  # counts for itself
            rate_limited(limiter, key=lambda: "one")(function)
    mail, print_ = (rate_limited(limiter, key=lambda name=name: name)(lambda: 1) for name in ("mail", "print"))
    assert [mail() for _ in range(5)] == [1] * 5
    with pytest.raises(RateLimited, match="agent 'mail'"):
        mail()
    assert print_() == 1


def test_a_function_that_is_defined_again_is_the_same_by_its_name(limiter: Limiter) -> None:
    """As it is in another process, and in an application that is created twice."""

    def create() -> Callable[[], int]:
        @rate_limited(limiter)
        def view() -> int:
            return 1

        return view

    assert [create()() for _ in range(5)] == [1] * 5
    with pytest.raises(RateLimited, match=r"create\.<locals>\.view' at 5/minute"):
        create()()


# In a server ----------------------------------------------------------------------------------------------------------


def test_b3_a_view_that_is_limited_answers_with_429() -> None:
    app = Flask(__name__)
    app.register_error_handler(RateLimited, too_many_requests)
    limiter = Limiter("2/minute", store=MemoryStore(clock=ManualClock()))

    @app.get("/users/<name>")
    @rate_limited(limiter, key="name", cost=lambda name: 3 if name == "eve" else 1)
    def user(name: str) -> str:
        return f"hello {name}"

    with app.test_client() as client:
        assert [client.get("/users/bob").status_code for _ in range(2)] == [200, 200]
        denied = client.get("/users/bob")
        assert (denied.status_code, denied.headers["Retry-After"]) == (429, "30")
        assert denied.content_type == "application/problem+json"
        body = json.loads(denied.data)
        assert (body["error"], body["retry_after_ms"], body["tier"]) == ("rate_limited", 30_000, "2/minute")
        assert (body["status"], body["violated-policies"]) == (429, ["2/minute"])
        assert client.get("/users/ann").text == "hello ann"
        assert client.get("/users/eve").headers["Retry-After"] == "60"
    error = RateLimited("bob", 2 / 60, "2/minute", 1)
    assert dict(too_many_requests(error)[2])["retry-after"] == "1"
