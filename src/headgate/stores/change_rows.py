"""How changes are stored: the rows of an SQLite file and of a list in Redis. Their format is an interface.

A row is one edit:

| field                | meaning                                                             |
|----------------------|---------------------------------------------------------------------|
| kind                 | "override", "exemption", "default", "session", "block", "role",     |
|                      | "account", "agent_plan", "account_limit", "account_plan",           |
|                      | "level_limit" or "plan_limit"                                       |
| agent, channel, tier | its subject; "" where all of them are meant                         |
| value                | by kind, as below; null: removed                                    |
| by, at               | who made the change, and when, in seconds since 1970                |
| more (optional)      | the next row belongs to the same change                             |
| generation (optional)| in a snapshot: how often the default had been changed               |

Of the kinds about accounts, the agent is the path of the account, the level or the plan, and the tier is the resource:
"usd", or "usd@web" for one tool. The value is a limit's text, the name of a plan, or the path of an agent's account.

The value of an override, a default and a session is a limit's text, that of an exemption "exempt", that of a role its
name. That of a block is JSON: `{"until": 1800000000.0, "reason": "it loops"}`; until null is without an end.

The rows of one change are written in one step. Applying all rows in their order gives the limits in effect. Compaction
keeps it so: it replaces the oldest rows by a snapshot, rows of the same form and with the same effect. So a version
that doesn't know the optional fields reads single changes, and enforces the same limits. (In a fleet, once a log is
compacted, it counts defaults that were changed apart from newer versions: it doesn't know their generation.) Unknown
fields and kinds are ignored. A row that can't be read, or whose limit can't, has no effect either: it becomes an edit
of the kind `UNREADABLE`, so that positions stay what they are.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from headgate.limits.decision import Limit
from headgate.limits.notation import parse, parse_each
from headgate.stores.base import LAST_MOMENT, UNREADABLE, Block, Change, Edit

_SUBJECT: Final = ("agent", "channel", "tier")
_EDIT: Final = ("kind", *_SUBJECT, "value")
_MOST: Final = 2**63  # that a database can store
_LIMITS: Final = ("override", "default", "session")  # values are limits
_ACCOUNT_LIMITS: Final = (
    "account_limit",
    "level_limit",
    "plan_limit",
)  # the same, of which a resource scales each part


def to_rows(change: Change) -> list[dict[str, Any]]:
    """The rows of a change."""
    rows: list[dict[str, Any]] = []
    for edit in change.edits:
        row = {name: getattr(edit, name) for name in _EDIT} | {"by": change.by, "at": change.at}
        if edit.generation:
            row["generation"] = edit.generation
        rows.append(row)
    for row in rows[:-1]:
        row["more"] = True
    return rows


def to_edit(row: Mapping[str, Any]) -> Edit:
    """The edit of a row."""
    kind, value, generation = row.get("kind"), row.get("value"), row.get("generation", 0)
    agent, channel, tier = [row.get(name, "") for name in _SUBJECT]
    texts = all(isinstance(text, str) for text in (agent, channel, tier))
    counted = isinstance(generation, int) and 0 <= generation < _MOST
    if not isinstance(kind, str) or not texts or not isinstance(value, str | None) or not counted:
        return Edit(UNREADABLE, value="?")
    if value is not None and not _is_readable(kind, value):
        return Edit(UNREADABLE, agent, channel, tier, "?")
    return Edit(kind, agent, channel, tier, value, generation)


def _is_readable(kind: str, value: str) -> bool:
    try:
        if kind in _LIMITS:
            read_limit(value)
        elif kind in _ACCOUNT_LIMITS:
            parse_each(value)
        elif kind == "block":
            Block.read(value)
    except ValueError:  # InvalidInput is one, too
        return False
    return True


@lru_cache(maxsize=16_384)
def read_limit(text: str) -> Limit:
    """The limit that a row sets. Many rows set the same, and all are read again at every reload."""
    return parse(text)


def to_changes(rows: Iterable[Mapping[str, Any]]) -> list[Change]:
    """The changes that rows were made of."""
    changes: list[Change] = []
    edits: list[Edit] = []
    for row in rows:
        edits.append(to_edit(row))
        if not row.get("more"):
            by = row.get("by", "")
            changes.append(Change(tuple(edits), by if isinstance(by, str) else "", _time(row.get("at"))))
            edits = []
    return changes


def _time(at: Any) -> float:
    """When a change was made; 0.0 if that can't be read."""
    return float(at) if type(at) in (int, float) and 0 <= at <= LAST_MOMENT else 0.0
