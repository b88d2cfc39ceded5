"""The README's commands work as written."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub_process import hub_process
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
"""The shell commands: the first starts a hub, the others are for a second shell."""


def test_the_first_command_starts_a_hub() -> None:
    assert TYPED[0] == "./dev serve\n"
    assert README.index("./dev serve") == README.index("./dev")
    shown = subprocess.run([sys.executable, ROOT / "dev"], capture_output=True, text=True, check=True).stdout
    assert "./dev serve [args]" in shown


def test_the_readme_fits_on_a_few_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:40])
    assert "limiter.check(" in first_screen
    assert "./dev serve" in first_screen
    assert "dashboard.png" in first_screen


def test_the_next_lines_register_connect_get_limited_and_see_it_lifted(tmp_path: Path) -> None:
    programs = tmp_path / ".dev" / "run" / "bin"  # where ./dev serve puts them
    programs.mkdir(parents=True)
    for name, arguments in (("python", ""), ("headgate", "-m headgate")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    surroundings = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    config = tmp_path / "headgate.toml"
    config.write_text('[limits]\nlight = "120/day"\n')  # no refill during the test, however slow the machine
    options = ("--config", str(config), "--identify-within", str(PATIENCE))
    with hub_process(tmp_path / "headgate-data", *options, environment={"HEADGATE_ADMIN_TOKEN": None}) as hub:
        wait_for(lambda: "hga_" in "".join(hub.out), "the admin token")
        (token,) = re.findall(r"\bhga_\S+", "".join(hub.out))
        lines = "".join(TYPED[1:])
        assert lines.count("127.0.0.1:8080") == 1
        done = subprocess.run(
            ["bash", "-eu", "-c", lines.replace("127.0.0.1:8080", str(hub))],
            cwd=tmp_path, env=surroundings | {"HEADGATE_HUB": f"http://{hub}"}, input=f"{token}\n", capture_output=True,
            text=True, timeout=5 * PATIENCE, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    limited, denial, *override, lifted, pong = done.stdout.splitlines()
    shown = re.findall(r"^\{.*\}$", README, re.MULTILINE)
    assert ast.literal_eval(limited) == ast.literal_eval(shown[0])
    assert list(ast.literal_eval(denial)) == list(ast.literal_eval(shown[1]))
    assert override[0] == "overrides of planner:"
    assert override[-1].split() == ["planner", "http", "light", "1000/minute"]
    assert ast.literal_eval(lifted) == {"identified": 1, "pong": 150}
    assert ast.literal_eval(pong) == {"type": "pong", "id": 149}
