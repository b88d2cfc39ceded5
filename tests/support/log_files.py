"""Logs for the tests of replays."""

import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headgate import Policy
from headgate.replay.options import LogOptions
from headgate.replay.report import Report, replay

BEGIN = 1_700_000_000
"""2023-11-14T22:13:20Z."""


def csv(folder: Path, rows: Iterable[Iterable[object]], head: str = "time,agent,tier", name: str = "log.csv") -> str:
    """The path of a log with these rows; times are seconds after `BEGIN`."""
    path = folder / name
    lines = [",".join([str(BEGIN + float(str(time))), *map(str, rest)]) for time, *rest in rows]
    path.write_text("\n".join([head, *lines, ""]))
    return str(path)


def written(folder: Path, text: str | bytes, name: str = "a.log", *, packed: bool = False) -> str:
    """The path of a log with this text."""
    data = text.encode() if isinstance(text, str) else text
    path = folder / name
    path.write_bytes(gzip.compress(data) if packed else data)
    return str(path)


def access(time: str = "14/Nov/2023:22:13:20 +0000", user: str = "-", more: Mapping[str, Any] | None = None) -> str:
    """A line of a combined log."""
    parts = {"address": "10.0.0.1", "request": "GET / HTTP/1.1", "status": 200} | dict(more or {})
    return f'{parts["address"]} - {user} [{time}] "{parts["request"]}" {parts["status"]} 17 "-" "curl/8.5"'


def played(*logs: str, policy: Policy | None = None, other: Policy | None = None, **how: Any) -> Report:
    """The report of a replay; what isn't an option of `replay` is one of how lines are read."""
    options = {name: how.pop(name) for name in ("share", "worst", "on_progress") if name in how}
    policies = {"now": policy or Policy()} | ({} if other is None else {"next": other})
    return replay(logs, policies, LogOptions(**how), **options)
