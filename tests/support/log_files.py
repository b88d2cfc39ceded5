"""Log files for the tests of replay, and replays of them."""

import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headgate import Policy
from headgate.replay.options import LogOptions
from headgate.replay.report import Report, replay

BEGIN = 1_700_000_000
"""2023-11-14T22:13:20Z."""


def write_csv(
    folder: Path, rows: Iterable[Iterable[object]], header: str = "time,agent,tier", name: str = "log.csv"
) -> str:
    """Write a log and return its path; times are seconds after `BEGIN`."""
    path = folder / name
    lines = [",".join([str(BEGIN + float(str(time))), *map(str, rest)]) for time, *rest in rows]
    path.write_text("\n".join([header, *lines, ""]))
    return str(path)


def write_log(folder: Path, text: str | bytes, name: str = "a.log", *, compressed: bool = False) -> str:
    """Write a log and return its path."""
    data = text.encode() if isinstance(text, str) else text
    path = folder / name
    path.write_bytes(gzip.compress(data) if compressed else data)
    return str(path)


def access_line(
    time: str = "14/Nov/2023:22:13:20 +0000", user: str = "-", more: Mapping[str, Any] | None = None
) -> str:
    """A line of a combined access log."""
    parts = {"address": "10.0.0.1", "request": "GET / HTTP/1.1", "status": 200} | dict(more or {})
    return f'{parts["address"]} - {user} [{time}] "{parts["request"]}" {parts["status"]} 17 "-" "curl/8.5"'


def replay_report(*logs: str, policy: Policy | None = None, other: Policy | None = None, **options: Any) -> Report:
    """The report of a replay. `options` are those of `replay` and of `LogOptions`."""
    own = {name: options.pop(name) for name in ("share", "worst", "on_progress") if name in options}
    policies = {"now": policy or Policy()} | ({} if other is None else {"next": other})
    return replay(logs, policies, LogOptions(**options), **own)
