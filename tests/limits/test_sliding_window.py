"""Sliding windows that holds give back to. What checks and refunds do is tested with the stores."""

from headgate import SlidingWindow


def test_a_log_that_became_empty_counts_from_nothing() -> None:
    limit = SlidingWindow(10, 5)
    log = limit.fresh(0)
    limit.spend(log, 0, 3)
    limit.spend(log, 4, 2)
    limit.spend(log, 5_000_002, 1)
    assert limit.wait(log, 5_000_002, 0) == 0  # the first entry has left
    for moment in (4, 5_000_002):
        limit.correct(log, 5_000_002, 2, 0, moment, 0)
    limit.spend(log, 5_000_002, 4)
    assert limit.decide(log, 5_000_002, 0, 0, 0).remaining == 6
