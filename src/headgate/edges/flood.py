"""Flood control: a connection that keeps sending although it is denied is read more slowly, so that the flood backs up
at its sender."""

from typing import Final

from headgate.limits.decision import Decision

FLOOD: Final = 10  # denials in a row from which on a connection floods
DENIALS: Final = 2_000  # a second, of all flooding connections together
LONGEST_PAUSE: Final = 1.0


def pause(connections: int, decision: Decision) -> float:
    """Seconds to wait before reading on from one of `connections` that flood, after another denial.

    It is never longer than until the next token, so that nothing that would pass is delayed.
    """
    share = min(LONGEST_PAUSE, connections / DENIALS)
    wait = decision.bucket_retry_after
    return share if wait is None else min(wait, share)
