"""What a rate limit adds to a request of a FastAPI application, called in process without sockets, in one run.

The applications do the same and take turns; the time is the processor's. What each adds is its best round less that of
the application without a limit.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from statistics import median
from time import process_time
from typing import Any, Final, NamedTuple, TypeAlias

from fastapi import Depends, FastAPI, Request, Response
from slowapi import Limiter
from slowapi.middleware import SlowAPIMiddleware
from slowapi.util import get_remote_address

from benchmarks import report
from benchmarks.measure import freeze
from benchmarks.report import Bar, at_least, at_most, bar_list, machine_line, table
from benchmarks.suite import say
from headgate import Gate
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import RateLimit

LEAST: Final = 8
"""How many times less than slowapi's the middleware must add."""
MOST_OF_FUNCTION: Final = 3
"""Microseconds that a limit function may add, if its text was seen before."""

BARE, HEADGATE, FUNCTION = "no limit", "headgate, middleware, headers", "headgate, middleware, a limit function"
EMPTY, DEPENDENCY = "no limit, an empty FastAPI dependency", "headgate, FastAPI dependency, headers"
SLOWAPI, SLOWAPI_MIDDLEWARE = "slowapi, decorator, headers", "slowapi, middleware, headers"
_MUCH: Final = "1000000000/minute"  # so that nothing is denied
_SCOPE: Final = {
    "type": "http",
    "asgi": {"version": "3.0"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"",
    "root_path": "",
    "headers": [(b"host", b"example.com"), (b"user-agent", b"benchmark"), (b"accept", b"*/*")],
    "client": ("203.0.113.9", 50000),
    "server": ("203.0.113.1", 80),
}

App: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


class Scale(NamedTuple):
    """How much is measured."""

    rounds: int
    requests: int


FULL: Final = Scale(rounds=40, requests=1000)
QUICK: Final = Scale(rounds=5, requests=300)


@dataclass
class Results:
    """Everything that a run measures: microseconds of the processor for each request, by rounds."""

    machine: dict[str, str]
    times: dict[str, list[float]] = field(default_factory=dict)

    def adds(self, name: str) -> float:
        return min(self.times[name]) - min(self.times[BARE])


def _bare() -> FastAPI:
    app = FastAPI()

    @app.get("/")
    async def root() -> dict[str, int]:
        return {"answer": 42}

    return app


def _slowapi(*, headers: bool) -> FastAPI:
    limiter = Limiter(key_func=get_remote_address, headers_enabled=headers)
    app = FastAPI()
    app.state.limiter = limiter

    @app.get("/")
    @limiter.limit(_MUCH)
    async def root(request: Request, response: Response) -> dict[str, int]:
        return {"answer": 42}

    return app


def _slowapi_middleware() -> FastAPI:
    app = _bare()
    app.state.limiter = Limiter(key_func=get_remote_address, headers_enabled=True, default_limits=[_MUCH])
    app.add_middleware(SlowAPIMiddleware)
    return app


def limited_app(**options: Any) -> FastAPI:
    """An application with headgate's middleware."""
    app = _bare()
    app.add_middleware(RateLimitMiddleware, **{"limiter": _MUCH, **options})
    return app


class _Empty:
    """What FastAPI itself needs for a dependency."""

    async def __call__(self) -> None: ...


def _dependency(dependency: Callable[..., Any]) -> FastAPI:
    app = FastAPI()

    @app.get("/", dependencies=[Depends(dependency)])
    async def root() -> dict[str, int]:
        return {"answer": 42}

    return app


def _applications() -> dict[str, App]:
    gate = Gate()
    gate.set_default("normal", _MUCH)
    return {
        BARE: _bare(),
        HEADGATE: limited_app(),
        FUNCTION: limited_app(limiter=lambda request: _MUCH),
        "headgate, middleware, both kinds of headers": limited_app(headers="both"),
        "headgate, middleware, a key function": limited_app(key=lambda request: request.headers.get("user-agent")),
        "headgate, middleware, a gate and a key function": limited_app(
            limiter=None, gate=gate, key=lambda request: "a"
        ),
        EMPTY: _dependency(_Empty()),
        DEPENDENCY: _dependency(RateLimit(_MUCH)),
        "slowapi, decorator, no headers": _slowapi(headers=False),
        SLOWAPI: _slowapi(headers=True),
        SLOWAPI_MIDDLEWARE: _slowapi_middleware(),
    }


async def _receive() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}


async def send_requests(app: App, times: int) -> None:
    """Call an application, and expect it to answer each request."""
    statuses = set()

    async def send(message: dict[str, Any]) -> None:
        statuses.add(message.get("status", 200))

    for _ in range(times):
        await app(dict(_SCOPE), _receive, send)
    if statuses != {200}:
        raise RuntimeError(f"a request wasn't answered: {statuses}")


async def _measure(scale: Scale) -> Results:
    results = Results(report.machine(()))
    results.machine["packages"] = ", ".join(f"{name} {version(name)}" for name in ("fastapi", "slowapi"))
    applications = _applications()
    for turn in range(scale.rounds):
        for name, app in applications.items():
            if turn == 0:
                say(name)
            await send_requests(app, scale.requests // 10)  # the caches hold what the one before has left there
            freeze()
            begin = process_time()
            await send_requests(app, scale.requests)
            results.times.setdefault(name, []).append((process_time() - begin) / scale.requests * 1e6)
    return results


def measure(scale: Scale) -> Results:
    return asyncio.run(_measure(scale))


def markdown(results: Results) -> str:
    rows = []
    for name, times in results.times.items():
        added = f"{results.adds(name):.1f}" if name != BARE else ""
        less = f"{results.adds(SLOWAPI) / results.adds(name):.1f}" if name.startswith("headgate") else ""
        rows.append([name, f"{min(times):.1f}", added, less])
    head = ["a FastAPI request, µs", "time", "added", "times less than slowapi's decorator with headers"]
    noise = max(median(times) / min(times) - 1 for times in results.times.values())
    note = (
        f"In process, without sockets. Processor time in the best of {len(results.times[BARE])} rounds; the "
        f"applications take turns within a round. Noise: the median round was up to {noise:.0%} slower than the best."
    )
    return "\n\n".join([machine_line(results.machine), table(head, rows), note, bar_list(bars(results))]) + "\n"


def bars(results: Results) -> list[Bar]:
    return [
        at_least(
            f"the middleware with headers adds at least {LEAST} times less than {name}",
            results.adds(name) / results.adds(HEADGATE),
            LEAST,
        )
        for name in (SLOWAPI, SLOWAPI_MIDDLEWARE)
    ] + [
        at_most(
            f"a limit function adds at most {MOST_OF_FUNCTION} µs",
            results.adds(FUNCTION) - results.adds(HEADGATE),
            MOST_OF_FUNCTION,
        )
    ]
