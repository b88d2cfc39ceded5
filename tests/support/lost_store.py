"""A hub whose shared store loses its data, and an admin who accepts that."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headgate import RedisStore
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

OVERRIDE = "/api/admin/rate-limits/planner"
OLDER = "the server's data is older than what this hub has seen, or a part of it is lost"
LOST = "the server has lost its data, or is another, empty one"


@contextmanager
def hub_on(server: ValkeyServer | str, data: Path | None = None, **settings: Any) -> Iterator[HubServer]:
    """A hub whose store is on a server."""
    url = server if isinstance(server, str) else server.url
    with RedisStore(url, timeout=PATIENCE) as store, hub_server(store=store, data=data, **settings) as hub:
        yield hub


def flush_server(server: ValkeyServer) -> None:
    with server.client() as client:
        client.flushall()


def read_health(hub: HubServer) -> dict[str, Any]:
    with hub.http() as anyone:
        found: dict[str, Any] = anyone.get("/health").json()
        return found


def wait_until_store_is(hub: HubServer, state: str) -> None:
    wait_for(lambda: read_health(hub)["store"] == state, f"a store that is {state}")


def lose_data(server: ValkeyServer, hub: HubServer) -> None:
    """Let a server lose everything, and the hub notice it."""
    flush_server(server)
    wait_until_store_is(hub, "lost")


def lose_and_accept(server: ValkeyServer, hub: HubServer, agent_data: str = "drop") -> None:
    lose_data(server, hub)
    assert accept_loss(hub, agent_data)[0] == 200


def try_to_register(hub: HubServer, agent: str) -> tuple[int, str]:
    """Try to register as a stranger: the status, and the error if there is one."""
    with hub.http() as stranger:
        answer = stranger.post("/api/onboard/register", json={"agent_id": agent})
        return answer.status_code, answer.json().get("error", "")


def set_override(hub: HubServer, limit: str = "7/minute") -> int:
    with hub.http(ADMIN) as admin:
        return admin.put(OVERRIDE, json={"heavy": limit}).status_code


def limit_of_planner(hub: HubServer) -> str:
    return str(hub.hub.gate.limits_for("planner", "ws", "heavy"))


def accept_loss(hub: HubServer, agent_data: str) -> tuple[int, dict[str, Any]]:
    with hub.http(ADMIN) as admin:
        answer = admin.post("/api/admin/store/accept", json={"agent_data": agent_data})
        return answer.status_code, answer.json()


def dump_keys(server: ValkeyServer) -> dict[bytes, bytes]:
    """A backup."""
    with server.client() as client:
        return {key: client.dump(key) for key in client.keys("*admin*")}


def restore_keys(server: ValkeyServer, backup: dict[bytes, bytes]) -> None:
    with server.client() as client:
        for key, value in backup.items():
            client.restore(key, 0, value, replace=True)
