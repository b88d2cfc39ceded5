"""Litestar: a general limit, a tighter one for an expensive report, and lower costs with an API key.

    uvicorn --app-dir examples litestar_app:app

Then exceed the limit: curl -i localhost:8000/report
"""

from litestar import Litestar, get
from litestar.middleware import DefineMiddleware

from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.requests import HttpRequest

KEYS = {"a key of ours", "another"}


def cost(request: HttpRequest) -> int:
    return 1 if request.headers.get("x-api-key") in KEYS else 2


@get("/")
async def home() -> str:
    return "hello"


@get("/report")
async def report() -> dict[str, int]:
    return {"visitors": 7}


app = Litestar(
    route_handlers=[home, report],
    middleware=[DefineMiddleware(RateLimitMiddleware, limiter="100/minute", routes={"/report": "4/minute"}, cost=cost)],
)
