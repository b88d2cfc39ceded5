"""Any function: calls beyond a limit raise an error, or wait for their turn.

    python examples/decorator.py

The fourth message is denied; the third prompt waits for half a second.
"""

import asyncio

from headgate import Limiter, RateLimited
from headgate.edges.decorator import rate_limited


@rate_limited("3/minute", key="agent")
def send(agent: str, text: str) -> str:
    return f"{agent} sends {text!r}"


# Several functions share a limiter; with store="redis://localhost", several processes do.
tokens = Limiter("1000/second", name="tokens")


@rate_limited(tokens, key=lambda model, prompt: model, cost=lambda model, prompt: len(prompt), wait=5)
async def ask(model: str, prompt: str) -> str:
    return f"{model} has read {len(prompt)} characters"


async def converse() -> None:
    for answer in await asyncio.gather(*(ask("small", "why? " * 100) for _ in range(3))):
        print(answer)


if __name__ == "__main__":
    for text in ("one", "two", "three", "four"):
        try:
            print(send("bob", text))
        except RateLimited as denied:
            print(denied)
    print(f"bob has {send.limiter.peek('bob').remaining} left, ann has {send.limiter.peek('ann').remaining}")
    asyncio.run(converse())
