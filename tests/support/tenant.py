"""Agents of a hub that hold on their accounts by the decision service, and an admin."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx

from headgate import Policy
from tests.support.hub import ADMIN, HubServer, hub_server

ACCOUNTS: dict[str, Any] = {
    "default": {"agent": {"tokens": "1000/minute", "slots": "3 in flight"}, "session": {"usd": "2 in all"}},
    "tools": ["web"],
    "max_lease": 600,
    "at": {
        "acme": {"usd": "10/calendar month"},
        "acme/search": {"usd": "5/calendar day"},
        "acme/ops": {"usd": "9 in all"},
    },
}
AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "writer": {"account": "acme/search"},
    "cook": {"account": "acme/ops"},
}
POLICY = Policy(limits={"light": "100000/minute", "normal": "100000/minute"}, accounts=ACCOUNTS, agents=AGENTS)


class Tenant:
    """Agents of a hub of their own, and an admin."""

    def __init__(self, hub: HubServer) -> None:
        self.hub = hub
        self.admin = hub.http(ADMIN)
        names = ("planner", "writer", "cook", "stranger")
        self.planner, self.writer, self.cook, self.stranger = [hub.http(hub.register(name)) for name in names]

    def left(self, path: str) -> dict[str, str]:
        answer = self.admin.get(f"/v1/accounts/{quote(path, safe='')}")
        assert answer.status_code == 200, answer.text
        return {limit["resource"]: limit["left"] for limit in answer.json()["limits"]}

    def close(self) -> None:
        for client in (self.admin, self.planner, self.writer, self.cook, self.stranger):
            client.close()


@contextmanager
def open_tenant(policy: Policy = POLICY, **more: Any) -> Iterator[Tenant]:
    with hub_server(policy, **more) as hub:
        tenant = Tenant(hub)
        try:
            yield tenant
        finally:
            tenant.close()


def hold(client: httpx.Client, costs: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = client.post("/v1/holds", json={"costs": costs, **more})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def read_refusal(answer: httpx.Response) -> tuple[int, str, str]:
    found = answer.json()
    return answer.status_code, found["error"], found["detail"]
