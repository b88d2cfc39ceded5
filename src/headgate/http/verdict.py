"""A decision in full, as JSON: the answer of the hub's route /api/admin/check, and of `headgate check --json`."""

from typing import Any

from headgate.http.header_writer import advised_wait
from headgate.limits.decision import Decision, Outcome


def describe_decision(decision: Decision) -> dict[str, Any]:
    wait = advised_wait(decision)
    return {
        "outcome": decision.outcome.value,
        "remaining": decision.remaining,
        "capacity": decision.limit.capacity,
        "limit": str(decision.limit),
        "retry_after_ms": None if wait is None else (wait + 999) // 1000,
        "exempt": decision.outcome is Outcome.EXEMPT,
        "violations": 0 if decision.violation is None else decision.violation.count,
        "would_be": None if decision.would_be is None else decision.would_be.value,
        "degraded": decision.degraded,
    }
