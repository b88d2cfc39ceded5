"""FastAPI: a general limit, a tighter one for logins, and one per user.

    uvicorn --app-dir examples fastapi_app:app

Then exceed the limit: curl -i -X POST "localhost:8000/login?name=bob"
"""

from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException

from headgate import Decision
from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.fastapi import RateLimit
from headgate.edges.requests import HttpRequest

app = FastAPI()
app.add_middleware(RateLimitMiddleware, limiter="100/minute", skip=["/health"])  # each client address


KEYS = {"a key of ours": "ann"}


def user(request: HttpRequest) -> str | None:
    return KEYS.get(request.headers.get("x-api-key", ""))  # without a key of ours, the address counts


@app.post("/login", dependencies=[Depends(RateLimit("3/minute", name="login"))])
async def login(name: str, password: str = "") -> str:
    if password != f"{name}'s secret":
        raise HTTPException(401, "wrong name or password")
    return f"welcome, {name}"


@app.get("/search")
async def search(words: str, decision: Annotated[Decision, Depends(RateLimit("10/minute", key=user))]) -> list[str]:
    found = sorted(words.split())
    return found if decision.remaining > 5 else found[:1]  # a short answer if little is left


@app.get("/health")
async def health() -> str:
    return "well"
