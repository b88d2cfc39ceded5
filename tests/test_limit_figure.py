"""The figure that shows what a limit means over time, and the figures beside it."""

from pathlib import Path

import pytest

from tools.limit_figure import FIGURE, LIMITS, draw, passed

pytestmark = pytest.mark.once


def test_the_figure_is_what_the_limits_do() -> None:
    assert FIGURE.read_text(encoding="utf-8") == draw(), "run tools/limit_figure.py"


def test_the_docs_say_how_many_pass() -> None:
    counts = []
    for limit, _ in LIMITS:
        steps = passed(limit)
        counts.append([[count for now, count in steps if now <= until][-1] for until in (0, 59.9, 60)])
    assert counts == [[60, 119, 120], [10, 69, 70], [60, 60, 120]]
    page = (Path(__file__).parent.parent / "docs" / "limiter.md").read_text(encoding="utf-8")
    assert '| `"60/minute"` | 60 | one per second: 119 in all | the 120th |' in page
    assert '| `"60/minute burst 10"` | 10 | one per second: 69 in all | the 70th |' in page
    assert '| `"60/minute sliding"` | 60 | none | 60 more |' in page
