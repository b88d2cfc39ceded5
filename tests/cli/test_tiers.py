"""Commands with tiers that the policy adds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import Policy
from tests.support.cli import Command, StartHub
from tests.support.valkey import ValkeyServer

pytestmark = pytest.mark.once

FILE = """
tiers = ["bulk"]
[limits]
bulk = "2/minute"
[actions.http]
post_import = "bulk"
"""
BULK = Policy(tiers=["bulk"], limits={"bulk": "2/minute"}, actions={"http": {"post_import": "bulk"}})
TIERS = "light, normal, heavy, bulk"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "headgate.toml"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_check_asks_for_a_tier_of_the_policy(running_hub: StartHub, headgate: Command) -> None:
    with running_hub(BULK) as hub:
        hub.register("planner")
        headgate("completion", "bash")  # which offers the built-in tiers alone
        assert headgate("check", "planner", "--tier", "bulk") == (0, "allow: ws bulk, 2/minute: 1 of 2 left\n", "")
        by_action = headgate("check", "planner", "--action", "post_import", "--channel", "http", "--peek")
        assert by_action == (0, "allow: http bulk, 2/minute: 2 of 2 left\n", "")
        for tier in ("bluk", ""):
            err = headgate("check", "planner", "--tier", tier).expect_error(2)
            assert f"tier: expected one of {TIERS}, got '{tier}'\n" in err


def test_check_asks_a_server_for_a_tier_of_the_policy(
    redis_server: ValkeyServer, headgate: Command, file: Path
) -> None:
    store = ("--store", redis_server.url, "--policy", str(file))
    assert headgate("check", f"{file}"[-100:], "--tier", "bulk", *store)[:2] == (
        0,
        "allow: ws bulk, 2/minute: 1 of 2 left\n",
    )
    for tier in ("bluk", ""):
        text = f"headgate check: tier: expected one of {TIERS}, got '{tier}'\n"
        assert headgate("check", "a", "--tier", tier, *store) == (2, "", text)


def test_overrides_of_a_tier_of_the_policy(
    running_hub: StartHub, headgate: Command, printed_json: Callable[..., Any]
) -> None:
    with running_hub(BULK) as hub:
        hub.register("planner")
        assert headgate("override", "set", "planner", "bulk=9/minute", "--channel", "ws") == (
            0,
            "overrides of planner:\nagent    channel  tier  limit\nplanner  ws       bulk  9/minute\n",
            "",
        )
        assert printed_json("override", "list")["overrides"] == {"planner": {"ws": {"bulk": "9/minute"}}}
        err = headgate("override", "set", "planner", "haevy=9/minute").expect_error()
        assert f"expected one of {TIERS}, ws, http, session, got 'haevy'" in err
        err = headgate("override", "set", "planner", "haevy=9/minute", "--channel", "ws").err
        assert f"ws: expected one of {TIERS}, got 'haevy'" in err


def test_policy_check_and_show_know_the_tiers(file: Path, headgate: Command, printed_json: Callable[..., Any]) -> None:
    out = headgate("policy", "check", str(file)).expect_output()
    assert '  tiers = ["bulk"]  (default: [])\n' in out
    assert '  limits.http.bulk = "2/minute"\n' in out
    shown = file.with_name("shown.toml")
    shown.write_text(headgate("policy", "show", str(file)).expect_output(), encoding="utf-8")
    assert Policy.load(shown) == Policy.load(file) == BULK
    assert printed_json("policy", "show", str(file))["tiers"] == ["bulk"]


def test_policy_check_reports_a_misspelled_tier(file: Path, headgate: Command) -> None:
    file.write_text(FILE.replace("[limits]", '[limits]\nhaevy = "5/minute"'), encoding="utf-8")
    mistake = "limits.haevy: expected one of heavy, light, normal, bulk, ws, http (did you mean heavy?)"
    assert headgate("policy", "check", str(file)).expect_error() == f"{file}: 1 mistake\n  {mistake}\n"
