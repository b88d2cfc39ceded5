"""The API of a shop, before and after its migration from slowapi to headgate (docs/coming-from.md)."""

import json
import os

from fastapi import Depends, FastAPI, WebSocket

from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import RateLimit
from headgate.edges.requests import HttpRequest
from headgate.http import ProblemDetails

PLANS = {"key of ann": "gold", "key of bob": "basic"}
LIMITS = {"gold": "6/day", "basic": "3/day"}
MONITOR = os.environ.get("MONITOR_TOKEN", "monitor")


def caller(request: HttpRequest) -> str | None:
    key = request.headers.get("x-api-key", "")
    return key if key in PLANS else None


def limit_of_plan(request: HttpRequest) -> str:
    return LIMITS[PLANS.get(caller(request) or "", "basic")]


def is_monitor(request: HttpRequest) -> bool:
    return request.headers.get("x-monitor") == MONITOR


def too_many_requests(request: HttpRequest, denial: ProblemDetails) -> tuple[str, str]:
    return json.dumps({"message": f"too many requests to {request.path}"}), "application/json"


app = FastAPI()
app.add_middleware(
    RateLimitMiddleware,
    key=caller,
    headers="x-ratelimit",
    store=os.environ.get("STORE_URL", "redis://localhost"),
    name="shop",
    body=too_many_requests,
)
default = Depends(RateLimit("8/day"))


@app.get("/", dependencies=[default])
async def home() -> str:
    return "welcome"


@app.get("/offers", dependencies=[default])
def offers() -> list[str]:
    return ["apples", "pears"]


@app.post("/login", dependencies=[Depends(RateLimit("2/hour;4/day"))])
async def login(name: str) -> str:
    return f"hello {name}"


@app.get("/search", dependencies=[Depends(RateLimit(limit_of_plan))])
async def search(words: str) -> list[str]:
    return words.split()


@app.get("/stock", dependencies=[Depends(RateLimit("3/day", exempt=is_monitor))])
def stock() -> dict[str, int]:
    return {"apples": 3}


@app.post("/orders", dependencies=[Depends(RateLimit("4/day", name="orders"))])
async def order() -> str:
    return "ordered"


@app.delete("/orders/{number}", dependencies=[Depends(RateLimit("4/day", name="orders"))])
async def cancel(number: int) -> str:
    return "cancelled"


@app.get("/health")
async def health() -> str:
    return "well"


@app.websocket("/chat")
async def chat(websocket: WebSocket) -> None:
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(text)
