"""The connected agents, and the limits on connections."""

from collections import Counter
from heapq import nsmallest
from typing import Final

from headgate.gate.lookup import counted_as
from headgate.hub.errors import RequestError
from headgate.hub.sockets.socket import Socket


class Presence:
    """The open WebSockets: all of them by address, and those of agents by name.

    At most `most_queued` frames wait for all sockets of an agent together.
    """

    def __init__(self, most: int, most_per_address: int, most_per_agent: int, most_queued: int) -> None:
        self._most, self._most_per_address, self._most_per_agent = most, most_per_address, most_per_agent
        self._most_queued: Final = most_queued
        self._addresses: Final[Counter[str]] = Counter()
        self._agents: Final[dict[str, list[Socket]]] = {}
        self.sockets: Final[set[Socket]] = set()

    def admit(self, socket: Socket) -> None:
        """Count a socket, or refuse it where there are too many."""
        address = counted_as(socket.address)
        if len(self.sockets) >= self._most:
            raise RequestError(
                503,
                "too_many_connections",
                f"expected at most {self._most} connections to the hub; try again later, or raise max_connections",
            )
        if self._addresses[address] >= self._most_per_address:
            raise RequestError(
                429,
                "too_many_connections",
                f"expected at most {self._most_per_address} connections from {address}; close one, or raise "
                "max_connections_per_address",
            )
        self._addresses[address] += 1
        self.sockets.add(socket)

    def release(self, socket: Socket) -> None:
        """A socket is closed."""
        address = counted_as(socket.address)
        self.sockets.discard(socket)
        self._addresses[address] -= 1
        if not self._addresses[address]:
            del self._addresses[address]

    def add(self, agent: str, socket: Socket) -> bool:
        """Add a socket of an agent that has identified, or refuse it; whether it is the agent's first."""
        if sum(not other.closed for other in self._agents.get(agent, ())) >= self._most_per_agent:
            raise RequestError(
                429, "too_many_connections", f"{agent!r} has {self._most_per_agent} connections, and may have no more"
            )
        sockets = self._agents.setdefault(agent, [])
        sockets.append(socket)
        return len(sockets) == 1

    def remove(self, agent: str, socket: Socket) -> bool:
        """Remove an agent's socket; whether it was the last."""
        sockets = self._agents[agent]
        sockets.remove(socket)
        if not sockets:
            del self._agents[agent]
        return not sockets

    def push(self, agent: str, frame: str, content: object = None) -> bool:
        """Push a frame to an agent, over its newest socket with room for it; whether there is one."""
        sockets = self._agents.get(agent, ())
        if sum(socket.queued for socket in sockets) >= self._most_queued:
            return False
        return any(socket.push(frame, content) for socket in reversed(sockets))

    def sockets_of(self, agent: str) -> list[Socket]:
        """An agent's sockets, oldest first."""
        return list(self._agents.get(agent, ()))

    def is_connected(self, agent: str) -> bool:
        return agent in self._agents

    def agents(self) -> list[str]:
        """The connected agents, by name."""
        return sorted(self._agents)

    def page(self, limit: int, after: str = "") -> tuple[list[str], bool]:
        """The next connected agents by name, and whether there are more."""
        found = nsmallest(limit + 1, (agent for agent in self._agents if agent > after))
        return found[:limit], len(found) > limit
