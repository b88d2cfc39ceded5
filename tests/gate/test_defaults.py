"""Defaults that were changed while running can be taken back: what the policy says holds again."""

from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, InvalidInput, MemoryStore, Policy
from headgate.gate.changes import default, no_default, session_limit
from headgate.gate.effective import effective
from headgate.stores.base import Edit
from tests.support.verbs import Verbs

POLICY = Policy(limits={"heavy": "6/minute", "http": {"heavy": "7/minute"}}, sessions={"limit": "9/second"})


def texts(gate: Gate) -> list[str]:
    places = [("ws", "heavy"), ("http", "heavy"), ("ws", "light"), ("http", "light")]
    return [*(str(gate.limits_for("a", *place)) for place in places), str(gate.effective.session_limit)]


@pytest.mark.parametrize(
    ("tier", "channel", "left"),
    [
        (None, None, ["6/minute", "7/minute", "120/minute", "120/minute", "9/second"]),
        ("heavy", None, ["6/minute", "7/minute", "2/minute", "2/minute", "3/second"]),
        ("heavy", "ws", ["6/minute", "1/minute", "2/minute", "2/minute", "3/second"]),
        (None, "ws", ["6/minute", "1/minute", "120/minute", "2/minute", "3/second"]),
        ("session", None, ["1/minute", "1/minute", "2/minute", "2/minute", "9/second"]),
    ],
)
def test_a_default_that_is_taken_back_is_the_policys_again(
    store: Any, verb: Verbs, tier: str | None, channel: str | None, left: list[str]
) -> None:
    gate = Gate(POLICY, store=store)
    gate.change([default("heavy", "1/minute"), default("light", "2/minute"), session_limit("3/second")])
    verb(gate, "remove_default")(tier, channel, by="ada")
    assert texts(gate) == left
    assert gate.history()[-1].by == "ada"
    gate.remove_default()
    assert texts(gate) == texts(Gate(POLICY)), "and so all of them"


def test_agents_begin_with_full_buckets(store: Any) -> None:
    gate = Gate(POLICY, store=store)
    gate.check("a", "ws", "heavy", cost=5)
    gate.set_default("heavy", "8/minute")
    gate.check("a", "ws", "heavy", cost=5)
    gate.remove_default("heavy")
    assert gate.check("a", "ws", "heavy").remaining == 5
    gate.remove_default("heavy")
    assert gate.check("a", "ws", "heavy").remaining == 4, "nothing has changed"


def test_later_edits_of_the_file_take_effect_again(tmp_path: Path) -> None:
    path = tmp_path / "headgate.db"
    with Gate(POLICY, remember=path) as gate:
        gate.change([default("heavy", "6/minute"), session_limit("9/second")])  # what the policy says
        gate.remove_default()
        assert [str(change) for change in gate.history()][1:] == ["default removed, session removed"]
    with Gate(Policy(limits={"heavy": "33/minute"}, sessions={"limit": "44/second"}), remember=path) as gate:
        assert texts(gate)[1:] == ["33/minute", "120/minute", "120/minute", "44/second"]
        gate.reload(POLICY)
        assert texts(gate) == texts(Gate(POLICY))


def test_a_removal_counts_as_a_change_of_the_default() -> None:
    course = [default("heavy", "1/minute"), no_default(), no_default("heavy"), default("heavy", "6/minute")]
    found = effective(POLICY, course).generations
    assert found == {("ws", "heavy"): 2, ("http", "heavy"): 3}, "where the limit has changed"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("huge",), "tier: expected one of light, normal, heavy, got 'huge'"),
        (("heavy", "smtp"), "channel: expected one of ws, http, got 'smtp'"),
        (("", None), "tier: expected the name of a tier, got ''"),
        (("heavy", ""), "channel: expected the name of a channel, got ''"),
        (("session", "ws"), "channel: expected none, since sessions have no channel, got 'ws'"),
        ((5,), "tier: expected the name of a tier, got 5"),
    ],
)
def test_a_default_that_cannot_be_taken_back_is_refused(arguments: tuple[Any, ...], text: str) -> None:
    gate = Gate(store=MemoryStore())
    with pytest.raises(InvalidInput) as caught:
        gate.remove_default(*arguments)
    assert str(caught.value) == text
    with pytest.raises(InvalidInput):
        gate.change([Edit("default", "a", "", "heavy", None)])
    assert gate.history() == []
