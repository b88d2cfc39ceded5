"""The comparison of two versions: which subjects are measured. Holds and accounts beside checks, on a small scale."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accounts, holds, hub_load, hub_suite, litellm_contest, versions
from benchmarks.hub_report import MESSAGE, PING, Pair
from benchmarks.litellm_contest import (
    DENIED,
    HEADGATE,
    LITELLM,
    LITELLM_PIPELINE,
    NEIGHBOURS,
    Contest,
    Crowd,
    ScriptCounter,
)
from benchmarks.redis_report import ONE_CORE
from headgate import RedisStore
from tests.support.valkey import PATIENCE, ValkeyServer

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


@pytest.mark.long
def test_holds_on_five_levels_are_measured_beside_checks() -> None:
    scale = accounts.Scale(
        rounds=2, memory_calls=20, calls=10, task_calls=2, open=1000, processes=(1, 2), seconds=0.1,
        litellm=litellm_contest.Scale(1, 1, 1),
    )  # fmt: skip
    results = accounts.measure(scale, None)
    text = accounts.markdown(results)
    for place in (holds.MEMORY, holds.ON_SERVER + ONE_CORE, holds.TASKS):
        for kind in accounts.KINDS:
            assert results.to_check(place, kind) > 1
            assert f"| {place}: {kind} | " in text
    assert 50 < results.bytes_per_hold < results.bytes_with_session < 2000
    assert [count for count, carried in results.carried.items() if carried.per_second > 0] == [1, 2]
    assert results.carried_ahead.keys() == results.carried.keys()
    assert "LiteLLM" not in text.partition("- ")[0]
    unmeasured = [bar.what for bar in accounts.bars(results) if bar.holds is None]
    assert [what for what in unmeasured if "neighbour" in what or "LiteLLM" in what] == unmeasured
    assert len(unmeasured) == 2


def test_f1_a_full_team_costs_its_neighbour_nothing() -> None:
    """headgate's side of the comparison with LiteLLM, which isn't installed here."""

    async def run(url: str) -> Crowd:
        async with RedisStore(url, timeout=PATIENCE) as store:
            with ExitStack() as gates:
                contender, counter = litellm_contest.headgate_contender(store, gates), ScriptCounter(client)
                return await litellm_contest.crowd(contender, 2, counter)

    with ValkeyServer() as server, server.client() as client:
        assert asyncio.run(run(server.url)) == Crowd(alone=[NEIGHBOURS] * 2, beside=[NEIGHBOURS] * 2, full=0)


def test_a_contender_that_decides_without_the_server_is_found() -> None:
    with ValkeyServer() as server, server.client() as client:
        counter = ScriptCounter(client)
        client.eval("return 1", 0)
        counter.expect(1)
        with pytest.raises(RuntimeError, match="at least 2 calls of scripts, got 1: the server was left out"):
            counter.expect(2)


def test_the_comparison_with_litellm_counts_its_faster_way() -> None:
    results = accounts.Results({}, open=1)
    ten = Crowd([10, 10], [10, 10])
    contest = Contest(
        "1.2.3",
        {HEADGATE: ten, LITELLM: Crowd([10, 10], [3, 2]), LITELLM_PIPELINE: Crowd([10, 10], [4, 4])},
        {HEADGATE: [120_000.0, 100_000.0], LITELLM: [1_600_000.0], LITELLM_PIPELINE: [790_000.0, 800_000.0]},
    )
    results.contest = contest
    passed = f"holds: while a full team is denied {DENIED} times, all {NEIGHBOURS} requests of its neighbour pass"
    assert [str(bar) for bar in accounts.bars(results)[-2:]] == [
        f"{passed}: 10, and 0 of the full team",
        "missed: 50 tasks: five levels at least 8 times as fast as four of LiteLLM, the faster way: 7.9",
    ]
    table, note = accounts._beside_litellm(contest)
    assert table.splitlines()[2:] == [
        f"| {HEADGATE} | 10 | 10 | 100.0 | 1.0 x |",
        f"| {LITELLM} | 2 to 3 | 10 | 1600.0 | 16.0 x |",
        f"| {LITELLM_PIPELINE} | 4 | 10 | 790.0 | 7.9 x |",
    ]
    assert "estimates its tokens" in note
    contest.crowds[HEADGATE].beside[1] = 9
    assert accounts.bars(results)[-2].holds is False
