"""What the README tells its readers to type works as it stands there."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.support.hub_process import program
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPED = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
"""What is typed: the command that starts a hub, and then, in another shell, the rest."""


def test_the_first_command_starts_a_hub() -> None:
    assert TYPED[0] == "./dev serve\n"
    assert README.index("./dev serve") == README.index("./dev")
    loader = SourceFileLoader("dev", str(ROOT / "dev"))
    spec = spec_from_loader("dev", loader)
    assert spec is not None
    dev = module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(dev)
    finally:
        sys.dont_write_bytecode = before
    assert "./dev serve [args]" in (dev.__doc__ or "")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needed = [*extras["redis"], *(one for one in extras["server"] if one != "headgate[redis]")]
    assert {one.partition(">=")[0] for one in needed} == set(dev.HUB)


def test_the_next_lines_register_connect_get_limited_and_see_it_lifted(tmp_path: Path) -> None:
    python = tmp_path / ".dev" / "run" / "bin" / "python"  # as ./dev serve has left it
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    surroundings = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    config = tmp_path / "headgate.toml"
    config.write_text('[limits]\nlight = "120/day"\n')  # no token comes back in between, however long it takes
    options = ("--config", str(config), "--identify-within", str(PATIENCE))
    with program(tmp_path / "headgate-data", *options, environment={"HEADGATE_ADMIN_TOKEN": None}) as hub:
        wait_for(lambda: "hga_" in "".join(hub.out), "the admin token")
        (token,) = re.findall(r"\bhga_\S+", "".join(hub.out))
        lines = "".join(TYPED[1:])
        assert lines.count("127.0.0.1:8080") == 1
        done = subprocess.run(
            ["bash", "-eu", "-c", lines.replace("127.0.0.1:8080", str(hub))],
            cwd=tmp_path, env=surroundings, input=f"{token}\n", capture_output=True, text=True, timeout=5 * PATIENCE,
            check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    limited, denial, override, lifted, pong = done.stdout.splitlines()
    shown = re.findall(r"^\{.*\}$", README, re.MULTILINE)
    assert ast.literal_eval(limited) == ast.literal_eval(shown[0])
    assert list(ast.literal_eval(denial)) == list(ast.literal_eval(shown[1]))
    assert '"light":"1000/minute"' in override
    assert ast.literal_eval(lifted) == {"identified": 1, "pong": 150}
    assert ast.literal_eval(pong) == {"type": "pong", "id": 149}
