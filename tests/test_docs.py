"""The docs name everything that users can use."""

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import headgate
from headgate import Decision, Gate, Limiter, Policy, RedisStore
from headgate.events import Event
from headgate.sliding import RateLimiter, RateLimitResult
from headgate.stores import Store
from headgate.violations import Standing

DOCS = Path(__file__).parent.parent / "docs"
LIMITER = (DOCS / "limiter.md").read_text(encoding="utf-8")
GATE = (DOCS / "gate.md").read_text(encoding="utf-8")
REDIS = (DOCS / "redis.md").read_text(encoding="utf-8")
EXAMPLE = (DOCS / "headgate.toml").read_text(encoding="utf-8")


def public(thing: type) -> list[str]:
    """Public names, without the async twin of another."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    return [name for name in names if not (name.startswith("a") and name[1:] in names)]


def missing(names: list[str], text: str) -> list[str]:
    """Those that stand nowhere as code: `name`, .name or name(."""
    return [name for name in names if not re.search(rf"[`.]{name}\b|\b{name}\(", text)]


INSIDE = ("ask", "aask", "book", "decide_without", "keys", "spare")
FOR_STORES = ("adrift", "denied", "later", "offended", "own_wait", "watched", "retry_us")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (public(Limiter), LIMITER),
        ([name for name in public(Decision) if name not in FOR_STORES], LIMITER + GATE),
        (public(Gate), GATE),
        (public(Standing), GATE),
        ([name for name in public(RedisStore) if name not in (*dir(Store), *INSIDE)], REDIS),
        ([*inspect.signature(RedisStore).parameters][1:], REDIS),
        (public(RateLimiter) + list(RateLimitResult.__slots__), REDIS),
        ([event.__name__ for event in get_args(Event)], GATE),
        ([name for name in headgate.__all__ if name not in ("Limit", "Outcome")], LIMITER + GATE),
    ],
    ids=["Limiter", "Decision", "Gate", "Standing", "RedisStore", "options", "RateLimiter", "events", "headgate"],
)  # fmt: skip
def test_every_public_name_is_in_the_docs(names: list[str], text: str) -> None:
    assert missing(names, text) == []


def test_every_setting_is_in_the_annotated_example() -> None:
    def keys(table: dict[str, Any]) -> list[str]:
        found = []
        for key, value in table.items():
            found += [key, *(keys(value) if isinstance(value, dict) else [])]
        return found

    assert [key for key in keys(Policy().settings()) if key not in EXAMPLE] == []
