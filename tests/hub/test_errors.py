"""What a hub logs of requests that it couldn't answer."""

import pytest
from structlog.testing import capture_logs

from headgate.errors import StoreAway
from headgate.hub import errors
from headgate.hub.errors import INTERVAL, MAX_LINES, FailureLog, as_request_error

FURTHER = "further failures of requests are counted, not logged"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the log of failures, as its only item."""
    now = [1000.0]
    monkeypatch.setattr(errors, "_failures", FailureLog(lambda: now[0]))
    return now


def fail(times: int) -> list[str]:
    """Answer so many requests while the store is away; what is logged."""
    with capture_logs() as logged:
        for _ in range(times):
            answer = as_request_error(StoreAway("nobody listens"))
            assert (answer.status, answer.error) == (503, "unavailable")
    return [line["event"] for line in logged]


@pytest.mark.usefixtures("clock")
def test_f4_failures_are_logged_with_their_reason() -> None:
    with capture_logs() as logged:
        as_request_error(StoreAway("nobody listens"))
        as_request_error(ZeroDivisionError("a mistake"))
    away, mistake = logged
    assert away == {"event": "request failed", "reason": "nobody listens", "log_level": "error"}
    assert mistake["event"] == "request failed unexpectedly"
    assert isinstance(mistake["exc_info"], ZeroDivisionError)


def test_f4_a_flood_of_failures_does_not_flood_the_log(clock: list[float]) -> None:
    assert fail(MAX_LINES + 5_000) == ["request failed"] * MAX_LINES + [FURTHER]
    clock[0] += INTERVAL - 0.001
    assert fail(1) == []
    clock[0] += 0.001
    with capture_logs() as logged:
        as_request_error(StoreAway("nobody listens"))
    assert [line["event"] for line in logged] == ["more requests failed", "request failed"]
    assert logged[0]["failures"] == 5_001
    clock[0] += INTERVAL
    assert fail(1) == ["request failed"], "nothing was left out in between"
