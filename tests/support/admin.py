"""Helpers for tests of the admin routes."""

import httpx

from headgate import Policy
from headgate.hub.app import Hub
from tests.support.hub import ADMIN, AgentConnection

LIMITS = "/api/admin/rate-limits"
FEW = Policy(limits={"light": "2/minute"})


def ping(wire: AgentConnection, times: int = 1) -> list[str]:
    """The types of the answers to pings, without warnings."""
    answers = []
    for _ in range(times):
        answer = wire.ask("ping")
        while answer["type"] == "rate_limit_warning":
            answer = wire.hear()
        answers.append(answer["type"])
    return answers


def exhaust_limit(wire: AgentConnection) -> None:
    """Let an agent exhaust its limit, and be denied."""
    assert ping(wire, 3) == ["pong", "pong", "rate_limited"]


def list_changes(admin: httpx.Client) -> list[str]:
    return [change["what"] for change in admin.get("/api/admin/changes").json()["changes"]]


def direct_client(hub: Hub, token: str = ADMIN) -> httpx.AsyncClient:
    """A client that calls a hub directly, without a server."""
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.AsyncClient(transport=httpx.ASGITransport(hub), base_url="http://localhost", headers=headers)
