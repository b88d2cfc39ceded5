"""The command `headgate` within this process, and hubs that it finds."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from structlog.testing import capture_logs

from headgate import Policy, cli
from headgate.cli import main
from headgate.cli.hub_options import hub_from
from tests.support.cli import Command, CommandResult, StartHub
from tests.support.hub import ADMIN, HubServer, hub_server
from tests.support.log_level import log_level as log_level
from tests.support.valkey import PATIENCE

build_parser = cache(cli.build_parser)  # most of the time of a command


@pytest.fixture
def headgate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command with the admin's token, with nothing from outside, and with patience for a hub."""
    for name in os.environ:
        if name.startswith("HEADGATE_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HEADGATE_ADMIN_TOKEN", ADMIN)
    monkeypatch.setattr(cli, "build_parser", build_parser)
    monkeypatch.setattr(hub_from, "__kwdefaults__", {"viewer": False, "timeout": PATIENCE})

    def run(*arguments: str) -> CommandResult:
        capsys.readouterr()
        code: Any
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        return CommandResult(code, *capsys.readouterr())

    return run


@pytest.fixture
def printed_json(headgate: Command) -> Callable[..., Any]:
    """Run a command with --json that succeeds; what it prints."""

    def run(*arguments: str) -> Any:
        out = headgate(*arguments, "--json").expect_output()
        assert out.count("\n") == 1
        assert out.isascii()
        return json.loads(out)

    return run


@pytest.fixture
def running_hub(headgate: Command, monkeypatch: pytest.MonkeyPatch) -> StartHub:
    """Start a hub that the commands find."""

    @contextmanager
    def start(policy: Policy | None = None, **settings: Any) -> Iterator[HubServer]:
        with (
            capture_logs(),
            hub_server(policy, **settings) as hub,
        ):  # its log would stand between what the commands print
            monkeypatch.setenv("HEADGATE_HUB", f"http://{hub}")
            yield hub

    return start
