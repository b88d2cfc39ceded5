"""What tests of the relay's client share."""

from headgate.client import RelayClient, RelayMessage


async def take(client: RelayClient, number: int) -> list[RelayMessage]:
    return [await anext(client) for _ in range(number)]
