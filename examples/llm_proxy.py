"""FastAPI in front of a language model: API keys, a budget for each customer, streams, and an alert at 80 %.

    uvicorn --app-dir examples llm_proxy:app

LLM is the address of the model's server. One process keeps what is spent in files here; for several workers, STORE is a
server such as redis://localhost. Then ask, and read what is left:

curl -N localhost:8000/chat -H "x-api-key: initech's key" --json '{"messages": [{"role": "user", "content": "hello"}]}'
curl localhost:8000/budget -H "x-api-key: initech's key"
"""

import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from decimal import Decimal
from typing import Annotated

import httpx
from fastapi import Depends, FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from headgate import Gate, Hold, MemoryStore, Policy
from headgate.edges.asgi import RateLimitMiddleware
from headgate.events import AccountAlerted, Event

KEYS = {"initech's key": "initech-bot", "hooli's key": "hooli-bot"}  # API keys and their agents, as in your database
POLICY = Policy(
    accounts={
        "levels": ["customer", "agent", "session"],
        "default": {"customer": {"usd": "1/calendar month"}, "agent": {"usd": "5/calendar day"}},
        "plans": {"pro": {"usd": "100/calendar month"}},
        "at": {"initech": {"plan": "pro"}},
    },
    agents={"initech-bot": {"account": "initech"}, "hooli-bot": {"account": "hooli"}},
)
if "STORE" in os.environ:
    gate = Gate(POLICY, store=os.environ["STORE"])
else:
    gate = Gate(POLICY, store=MemoryStore(remember="spent.db"), remember="changes.db")
llm = httpx.AsyncClient(base_url=os.environ.get("LLM", "http://localhost:11434/v1"), timeout=60)


def warn(event: Event) -> None:
    if isinstance(event, AccountAlerted):  # send mail here
        logging.getLogger("uvicorn").warning("%s: %s usd left of %s", event.account, event.left, event.limit)


class Prompt(BaseModel):
    messages: list[dict[str, str]]
    max_tokens: int = Field(default=200, ge=1, le=4000)


def cost(prompt: int, output: int) -> dict[str, int | Decimal]:
    price = (prompt * Decimal("2.50") + output * Decimal(10)) / 1_000_000
    return {"tokens": prompt + output, "usd": round(price, 6)}


async def agent_of(x_api_key: Annotated[str, Header()]) -> str:
    if x_api_key not in KEYS:
        raise HTTPException(401, "unknown API key")
    return KEYS[x_api_key]


async def reserved(agent: Annotated[str, Depends(agent_of)], prompt: Prompt) -> AsyncIterator[Hold]:
    size = len(json.dumps(prompt.messages)) // 4
    async with gate.ahold(agent, cost(size, prompt.max_tokens), timeout=5) as hold:  # or a 429
        hold.use(cost(size, 0))  # the prompt costs even if the caller leaves at once
        try:
            yield hold
        finally:  # however the stream ends
            await hold.asettle()


async def answered(prompt: Prompt, hold: Annotated[Hold, Depends(reserved)]) -> AsyncIterator[httpx.Response]:
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **prompt.model_dump()}
    async with AsyncExitStack() as stack:
        try:
            answer = await stack.enter_async_context(llm.stream("POST", "chat/completions", json=body))
            answer.raise_for_status()
        except httpx.HTTPError as error:
            await hold.acancel()  # nothing was generated
            raise HTTPException(502, "the language model is unavailable") from error
        yield answer


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    gate.subscribe(warn, AccountAlerted)
    async with llm:
        yield
    await gate.aclose()


app = FastAPI(lifespan=lifespan)
app.add_middleware(RateLimitMiddleware, limiter="600/minute")  # each address; and it answers a denied hold with 429


@app.post("/chat")
async def chat(
    hold: Annotated[Hold, Depends(reserved)], answer: Annotated[httpx.Response, Depends(answered)]
) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                if usage := json.loads(line[6:]).get("usage"):  # with the last part
                    await hold.asettle(cost(usage["prompt_tokens"], usage["completion_tokens"]))
                else:
                    hold.use(cost(0, 1))
            yield f"{line}\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


@app.get("/budget")
async def budget(agent: Annotated[str, Depends(agent_of)]) -> dict[str, str]:
    return {one.account: f"{one.left} usd left of {one.limit}" for one in await gate.aexplain(agent)}
