"""The API of a shop, before and after its migration from slowapi to headgate (docs/coming-from.md)."""

import os

from fastapi import FastAPI, Request, Response, WebSocket
from fastapi.responses import JSONResponse
from slowapi import Limiter
from slowapi.errors import RateLimitExceeded
from slowapi.middleware import SlowAPIMiddleware
from slowapi.util import get_remote_address

PLANS = {"key of ann": "gold", "key of bob": "basic"}
LIMITS = {"gold": "6/day", "basic": "3/day"}
MONITOR = os.environ.get("MONITOR_TOKEN", "monitor")


def caller(request: Request) -> str:
    key = request.headers.get("x-api-key", "")
    return key if key in PLANS else get_remote_address(request)


def limit_of_plan(key: str) -> str:
    return LIMITS[PLANS.get(key, "basic")]


def is_monitor(request: Request) -> bool:
    return request.headers.get("x-monitor") == MONITOR


def too_many_requests(request: Request, error: Exception) -> Response:
    response = JSONResponse({"message": f"too many requests to {request.url.path}"}, 429)
    limiter._inject_headers(response, request.state.view_rate_limit)
    return response


app = FastAPI()
limiter = Limiter(
    key_func=caller,
    default_limits=["8/day"],
    headers_enabled=True,
    storage_uri=os.environ.get("STORE_URL", "redis://localhost"),
    key_prefix="shop",
)
app.state.limiter = limiter
app.add_exception_handler(RateLimitExceeded, too_many_requests)
app.add_middleware(SlowAPIMiddleware)


@app.get("/")
async def home() -> str:
    return "welcome"


@app.get("/offers")
def offers() -> list[str]:
    return ["apples", "pears"]


@app.post("/login")
@limiter.limit("2/hour;4/day")
async def login(request: Request, response: Response, name: str) -> str:
    return f"hello {name}"


@app.get("/search")
@limiter.limit(limit_of_plan)
async def search(request: Request, response: Response, words: str) -> list[str]:
    return words.split()


@app.get("/stock")
@limiter.limit("3/day", exempt_when=is_monitor)
def stock(request: Request, response: Response) -> dict[str, int]:
    return {"apples": 3}


@app.post("/orders")
@limiter.shared_limit("4/day", scope="orders")
async def order(request: Request, response: Response) -> str:
    return "ordered"


@app.delete("/orders/{number}")
@limiter.shared_limit("4/day", scope="orders")
async def cancel(request: Request, response: Response, number: int) -> str:
    return "cancelled"


@app.get("/health")
@limiter.exempt  # type: ignore[untyped-decorator]
async def health() -> str:
    return "well"


@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)
