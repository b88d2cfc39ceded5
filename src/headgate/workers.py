"""Whether a process is one of several workers, each of which counts for itself in its memory."""

import logging
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_MOST_SIBLINGS: Final = 64  # processes that are looked at

_log = logging.getLogger("headgate")


@cache
def warn_of_workers() -> None:
    """Look once in a process whether others count beside it."""
    if has_siblings():
        _log.warning(
            "this process is one of several workers, and each counts for itself: together they let more pass than the"
            " limit. To count as one, pass store='redis://…' to RateLimitMiddleware or Gate"
        )


def has_siblings() -> bool:
    """Whether this process is one of several workers: its parent has more children that run the same command.

    False if /proc is unavailable.
    """
    own, found = os.getpid(), []
    with suppress(OSError):
        for thread in Path(f"/proc/{os.getppid()}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return any(pid != own and _command(pid) == _command(own) for pid in found[:_MOST_SIBLINGS])


def _command(pid: int) -> bytes:
    """The command line of a process, without the numbers that differ between workers."""
    try:
        return re.sub(rb"\d+", b"", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:  # it has ended
        return str(pid).encode()
