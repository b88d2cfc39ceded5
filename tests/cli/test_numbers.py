"""Every option that takes a number, and every other one, with numbers that nobody can mean."""

import argparse
from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

from headgate.cli import build_parser
from headgate.errors import HeadgateError
from headgate.hub.settings import HubSettings
from tests.support.cli import Command, leaf_commands

pytestmark = pytest.mark.once

ABSURD = [
    "1e999999999",
    "1e-999999999",
    "-1e999999999",
    "1E+999999999",
    "1e400",
    "1e999999999/1",
    "1/0",
    "nan",
    "-inf",
    "infinity",
    "9" * 5000,
    "-" + "9" * 5000,
    "0." + "0" * 5000 + "1",
    "9" * 4000 + "/" + "9" * 4001,
    "1" * 20,
    "0x10",
    "1_0" * 20,
    "\u0663",
    "\udcff",
    "1,5",
    "",
]


def takes_number(action: argparse.Action) -> bool:
    """Whether the value of an option becomes a number; no other takes both of these."""
    found = []
    for text in ("1", "0.5"):
        with suppress(argparse.ArgumentTypeError, TypeError):
            found.append(action.type(text))  # type: ignore[misc, operator]
    return any(isinstance(one, (int, float, Fraction)) for one in found)


NUMBERS = [
    pytest.param(action, id=f"{command} {action.option_strings[0]}")
    for command, actions in leaf_commands(build_parser())
    for action in actions
    if takes_number(action)
]


def test_the_options_with_numbers_are_found() -> None:
    found = {str(one.id) for one in NUMBERS}
    assert found == {
        "check --cost", "replay --suggest", "replay --worst", "bench --seconds", "demo --seconds", "demo --agents",
        "demo --seed", "alerts --limit", "changes --limit", "tasks --limit", "tasks list --limit", "holds list --limit",
    }  # fmt: skip


@pytest.mark.parametrize("action", NUMBERS)
@pytest.mark.parametrize("text", ABSURD, ids=lambda text: ascii(text)[:20])
def test_an_absurd_number_is_refused_at_once(action: argparse.Action, text: str) -> None:
    assert callable(action.type)
    with pytest.raises(argparse.ArgumentTypeError, match="expected a "):
        action.type(text)


@pytest.mark.parametrize("text", ABSURD, ids=lambda text: ascii(text)[:20])
def test_an_absurd_number_in_a_limit_is_refused_at_once(headgate: Command, text: str) -> None:
    for limit in (f"{text}/minute", f"1 per {text or 'no'} minutes", f"1/minute burst {text or 'no'}"):
        code, out, err = headgate("override", "set", "a", f"heavy={limit}", "--hub", "http://127.0.0.1:1")
        assert (code, out) == (2, ""), limit
        assert "argument TIER=LIMIT: heavy: limit" in err
        code, out, err = headgate("check", "a", f"--limit={limit}", "--store", "redis://127.0.0.1:1")
        assert (code, out) == (2, ""), limit
        assert err.startswith("headgate check: limit")


@pytest.mark.parametrize(
    "name", [one.name for one in fields(HubSettings) if type(one.default) in (int, float)], ids=str
)
def test_an_absurd_number_in_a_setting_is_refused_at_once(name: str) -> None:
    for text in ABSURD:
        if text.isascii() and not text.startswith(("0.000", "1e-")):  # what is next to nothing may be 0 seconds
            given: dict[str, Any] = {name: text}
            with pytest.raises(HeadgateError):
                HubSettings.load(given)


@pytest.mark.parametrize("text", ["1e999999999", "9" * 5000, "\udcff", ""], ids=lambda text: ascii(text)[:20])
def test_an_absurd_number_in_place_of_anything_else_is_no_traceback(
    headgate: Command, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADGATE_HUB", "http://127.0.0.1:1")
    for command, actions in leaf_commands(build_parser()):
        if command == "serve":
            continue
        places = [text for one in actions if not one.option_strings]
        options = [one.option_strings[0] for one in actions if one.option_strings and one.nargs is None]
        for option in options if command in ("bench", "demo") else [None, *options]:
            given = [] if option is None else [option, text]
            code, out, err = headgate(*command.split(), *given, "--", *places)
            assert (code in (1, 2, 3), out) == (True, ""), (command, option)
            assert err
