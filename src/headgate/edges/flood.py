"""Those who go on though they are denied are read from more slowly, so that a flood waits at the flooder's."""

from typing import Final

from headgate.limits.decision import Decision

FLOOD: Final = 10  # so many denials: from then on a connection floods
DENIALS: Final = 2_000  # a second, of all connections that flood together
LONGEST_PAUSE: Final = 1.0


def pause(connections: int, decision: Decision) -> float:
    """How many seconds to wait before more is read from one of so many that flood, after it was denied again.

    Nothing that should pass is held up: it isn't longer than until the next token is there.
    """
    share = min(LONGEST_PAUSE, connections / DENIALS)
    wait = decision.bucket_retry_after
    return share if wait is None else min(wait, share)
