"""What tests of the relay's client share."""

from headgate.client import Message, RelayClient


async def take(client: RelayClient, number: int) -> list[Message]:
    return [await anext(client) for _ in range(number)]
