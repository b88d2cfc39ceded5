"""The tree of accounts that the benchmarks spend on: five levels, one limit on each, names of twelve characters."""

from typing import Any, Final

from headgate import Gate, Policy, RedisStore
from headgate.stores.base import Store

LEVELS: Final = ("org", "division", "team", "agent", "session")
ORG: Final = "organisation"
AGENTS: Final = 100
_TEAMS: Final = 10
_DIVISIONS: Final = 2

# Nothing is denied. Each limit differs from the others, so that one check can have all five.
BUCKETS: Final = ("1000000000/day", "100000000/hour", "500000000/hour", "10000000/minute", "20000000/minute")
MIXED: Final = (
    "1000000000 tokens/calendar month",
    "100000000 tokens/calendar day",
    "100000000/hour",
    "10000000/minute",
    "100000000 tokens in all",
)
DOLLARS: Final = (
    "1000000/calendar month",
    "100000/calendar day",
    "100000 per 24 hours",
    "100000/hour",
    "100000 in all",
)

TOKENS: Final[dict[str, Any]] = {"tokens": 12}
TOKENS_USED: Final[dict[str, Any]] = {"tokens": 8}
BOTH: Final[dict[str, Any]] = {"tokens": 12, "usd": "0.03"}
BOTH_USED: Final[dict[str, Any]] = {"tokens": 8, "usd": "0.0123"}


def agent_name(number: int) -> str:
    return f"agent-{number:06d}"


def session_name(number: int) -> str:
    return f"run-{number:08d}"


SESSION_OF: Final = {agent_name(number): session_name(number) for number in range(AGENTS)}


def account_of(number: int, org: str = ORG) -> str:
    return f"{org}/division-{number % _DIVISIONS:03d}/team-{number % _TEAMS:07d}"


def tree_gate(store: Store | None, tokens: tuple[str, ...], usd: tuple[str, ...] = ()) -> Gate:
    """A gate whose accounts have one limit of tokens on each level, and perhaps one of dollars."""
    defaults: dict[str, dict[str, str]] = {
        level: {"tokens": limit} for level, limit in zip(LEVELS, tokens, strict=True)
    }
    for level, limit in zip(LEVELS, usd, strict=False):
        defaults[level]["usd"] = limit
    agents = {agent_name(number): {"account": account_of(number)} for number in range(AGENTS)}
    policy = Policy(accounts={"levels": LEVELS, "default": defaults}, agents=agents)
    return Gate(policy) if store is None else Gate(policy, store=store)


def expect_server(store: RedisStore) -> None:
    """Verify that the server made the decisions."""
    if store.degraded:
        raise RuntimeError("headgate lost the server during the measurement")
