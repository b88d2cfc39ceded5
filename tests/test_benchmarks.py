"""The comparison of two versions: which subjects are measured. Holds beside checks, on a small scale."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import holds, hub_load, hub_suite, versions
from benchmarks.hub_report import MESSAGE, PING, Pair
from benchmarks.redis_report import ONE_CORE

pytestmark = pytest.mark.once


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was started and measured instead of hubs."""
    started: list[str] = []

    @contextmanager
    def hub(*_: object) -> Iterator[tuple[Any, dict[str, int]]]:
        started.append("hub")
        yield None, {}

    def load(what: str, *_: object) -> Pair:
        started.append(what)
        return Pair([], [])

    monkeypatch.setattr(hub_suite, "hub", hub)
    monkeypatch.setattr(hub_load, "load", load)
    monkeypatch.setattr(versions, "_cost", lambda _: 1.0)
    return started


@pytest.mark.parametrize(
    ("only", "measured"),
    [
        ("", list(hub_load.WORKLOADS)),
        ("hub", list(hub_load.WORKLOADS)),
        (f"hub, {PING}", [PING]),
        (MESSAGE, [MESSAGE]),
        ("Limiter.check", []),
    ],
)
def test_a_text_selects_the_workloads_of_a_hub(only: str, measured: list[str], started: list[str]) -> None:
    rows = list(versions.hub_rows(Path(), 1, only))
    assert rows == [(f"hub, {what}", 1.0, 1.0) for what in measured]
    assert started == (["hub", "hub", *measured] if measured else [])


def test_the_other_version_is_required(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["versions.py"])
    with pytest.raises(SystemExit):
        versions.main()
    assert "the following arguments are required: --package" in capsys.readouterr().err


@pytest.mark.long
def test_holds_are_measured_beside_checks() -> None:
    results = holds.measure(holds.Scale(rounds=2, memory_checks=20, checks=10, task_checks=2, open=2000))
    text = holds.markdown(results)
    for place in (holds.MEMORY, holds.ON_SERVER + ONE_CORE, holds.TASKS):
        assert results.ratio(place) > 1
        assert f"| {place} | " in text
    assert results.growth(holds.MEMORY) > 0
    assert 50 < results.bytes_per_hold < 1000
    bars = holds.bars(results)
    assert [bar.what for bar in bars if bar.holds is None] == [
        f"{place}: with 100,000 open holds of the key at most 20% more than with 10" for place in results.crowds
    ]
