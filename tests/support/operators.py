"""Operators, for tests: agents with a role."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx

from tests.support.hub import ADMIN, HubServer

ADMINS = "/api/admin/admins"


def status_and_error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def add_operator(admin: httpx.Client, name: str, role: str = "admin") -> str:
    """The token of a new operator."""
    answer = admin.post(ADMINS, json={"name": name, "role": role})
    assert answer.status_code == 201, answer.text
    token: str = answer.json()["token"]
    assert answer.json() == {"name": name, "role": role, "token": token}
    return token


@contextmanager
def operators(hub: HubServer, *names: str, role: str = "admin") -> Iterator[list[httpx.Client]]:
    """Clients of new operators."""
    with ExitStack() as stack:
        admin = stack.enter_context(hub.http(hub.hub.tokens.created or ADMIN))
        yield [stack.enter_context(hub.http(add_operator(admin, name, role))) for name in names]
