"""A gate with accounts, and what is spent and left of their limits."""

from datetime import date
from typing import Any

from headgate import Gate, Policy
from headgate.gate.accounts import Bound
from headgate.stores.base import Store

START = date(2026, 11, 17)
ACCOUNTS: dict[str, Any] = {
    "default": {
        "agent": {"tokens": "1000/minute", "slots": "2 in flight"},
        "session": {"usd": "2 in all"},
    },
    "at": {
        "acme": {"usd": "10/calendar month", "slots": "3 in flight"},
        "acme/search": {"usd": "5/calendar day", "tools": {"web": {"requests": "2/minute"}}},
        "acme/ops": {"usd": "1 in all"},
    },
}
AGENTS: dict[str, Any] = {
    "planner": {"account": "acme/search"},
    "writer": {"account": "acme/search"},
    "cook": {"account": "acme/ops"},
}


def gate_on(store: Store, **settings: Any) -> Gate:
    return Gate(Policy(**{"accounts": ACCOUNTS, "agents": AGENTS, **settings}), store=store)


def spent(gate: Gate, account: str) -> str:
    """What is spent of the dollars of an account."""
    (found,) = [one for one in gate.account(account).limits if one.resource == "usd"]
    return f"{found.spent.normalize():f} of {found.limit}"


def left(gate: Gate, agent: str, **where: Any) -> dict[str, str]:
    """What is left under every limit of an agent."""
    return {str(Bound(one.account, one.resource, one.tool)): str(one.left) for one in gate.explain(agent, **where)}
