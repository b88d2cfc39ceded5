"""Many concurrent clients of a server, each with its own connection."""

import asyncio
import socket


def is_listening(port: int) -> bool:
    """Whether a port is open."""
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def get_statuses(count: int, *ports: int) -> list[int]:
    """The statuses that `count` clients of each server get, all at once, sorted."""
    return sorted(asyncio.run(_many(count, ports)))


async def _many(count: int, ports: tuple[int, ...]) -> list[int]:
    async def one(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return int(answer.split(b" ")[1])

    return await asyncio.gather(*(one(port) for port in ports for _ in range(count)))
