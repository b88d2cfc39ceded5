"""Who is connected, and how many more may be."""

from collections import Counter
from typing import Final

from headgate.gate.lookup import counted_as
from headgate.hub.errors import Refused
from headgate.hub.sockets.socket import Socket


class Presence:
    """The WebSockets that are open: all of them by address, and those of agents by name."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most, self._most_per_address = most, most_per_address
        self._addresses: Final[Counter[str]] = Counter()
        self._agents: Final[dict[str, list[Socket]]] = {}
        self.sockets: Final[set[Socket]] = set()

    def enter(self, socket: Socket) -> None:
        """Let a socket in, or refuse it."""
        address = counted_as(socket.address)
        if len(self.sockets) >= self._most:
            raise Refused(503, "too_many_connections", f"the hub has {self._most} connections, and takes no more")
        if self._addresses[address] >= self._most_per_address:
            raise Refused(
                429, "too_many_connections", f"{address} has {self._most_per_address} connections, and may have no more"
            )
        self._addresses[address] += 1
        self.sockets.add(socket)

    def leave(self, socket: Socket) -> None:
        address = counted_as(socket.address)
        self.sockets.discard(socket)
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]

    def join(self, agent: str, socket: Socket) -> bool:
        """A socket has turned out to be an agent's; whether it is the only one."""
        sockets = self._agents.setdefault(agent, [])
        sockets.append(socket)
        return len(sockets) == 1

    def part(self, agent: str, socket: Socket) -> bool:
        """An agent's socket is gone; whether it was the last."""
        sockets = self._agents[agent]
        sockets.remove(socket)
        if not sockets:
            del self._agents[agent]
        return not sockets

    def push(self, agent: str, frame: str) -> bool:
        """Have a frame sent to an agent, over its newest socket that takes it."""
        return any(socket.push(frame) for socket in reversed(self._agents.get(agent, ())))

    def of(self, agent: str) -> list[Socket]:
        """An agent's sockets, oldest first."""
        return list(self._agents.get(agent, ()))

    def is_here(self, agent: str) -> bool:
        return agent in self._agents

    def agents(self) -> list[str]:
        """The agents that are connected, by name."""
        return sorted(self._agents)
