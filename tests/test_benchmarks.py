"""The comparison of two versions: which subjects are measured."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hub_load, hub_suite, versions
from benchmarks.hub_report import MESSAGE, PING, Pair

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
