"""./dev: the start without compiling."""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from http.client import HTTPConnection
from pathlib import Path

import pytest

from headgate._version import VERSION
from tests.support.valkey import PATIENCE
from tools import environments
from tools.environments import ROOT, digest, read, requirements, source_environment

pytestmark = pytest.mark.once

PLAIN = f"headgate {VERSION} (plain Python: not compiled)\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The environment `run` of an own .dev/, with its packages in the place that the stamp says."""
    monkeypatch.setattr(environments, "DEV", tmp_path / "a folder's name")
    home = tmp_path / "a folder's name" / "run"
    venv.create(home, symlinks=True)
    stamp = digest(requirements("server"), read(ROOT / "constraints.txt"), sys.version, sys.base_prefix)
    (home / "stamp").write_text(stamp)
    return home


def version(bin_: Path, cwd: Path) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(bin_ / "headgate"), "--version"]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=True).stdout


def test_the_source_runs_without_a_wheel(home: Path, tmp_path: Path) -> None:
    assert version(source_environment("run", "server"), tmp_path) == PLAIN
    assert version(source_environment("run", "server"), tmp_path) == PLAIN  # nothing is left to do


@pytest.mark.long
def test_the_source_replaces_a_wheel_and_is_replaced_by_one(
    home: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = small_wheel(tmp_path)
    environments.environment("run", "server", wheel=wheel)
    assert version(home / "bin", tmp_path) == "the wheel\n"
    assert version(source_environment("run", "server"), tmp_path) == PLAIN
    environments.environment("run", "server", wheel=wheel)
    assert version(home / "bin", tmp_path) == "the wheel\n"
    assert not environments.source_link(home).exists()
    assert "compiling" not in capfd.readouterr().out


def small_wheel(folder: Path) -> Path:
    """A wheel of the same name, which says that it is one."""
    wheel, info = folder / "headgate-0.0.1-py3-none-any.whl", "headgate-0.0.1.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("headgate/__init__.py", 'def main():\n    print("the wheel")\n')
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: headgate\nVersion: 0.0.1\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/entry_points.txt", "[console_scripts]\nheadgate = headgate:main\n")
        file.writestr(f"{info}/RECORD", "headgate/__init__.py,,\n")
    return wheel


def test_the_variable_is_for_serve_and_demo(tmp_path: Path) -> None:
    """No environment is needed: a release with an argument ends before."""
    checkout = copy_of_checkout(tmp_path)
    variables = os.environ | {"HEADGATE_PURE": "1"}
    command = [sys.executable, str(checkout / "dev"), "release", "now"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "dev: HEADGATE_PURE=1 has no effect on release; it is for serve and demo\n"
    assert done.stderr == "dev: release: expected no arguments, got now\n"


def test_the_script_runs_with_the_python_on_the_path_of_the_readme(tmp_path: Path) -> None:
    """The README puts .dev/run/bin on the path, whose Python has no pip. A release with an argument ends before pip."""
    checkout = copy_of_checkout(tmp_path)
    venv.create(checkout / ".dev" / "run", symlinks=True)
    (checkout / "tools" / "release.py").write_text("import sys\nprint(sys.prefix)\ncheck_release = None\n")
    path = os.pathsep.join([str(checkout / ".dev" / "run" / "bin"), os.environ["PATH"]])
    command = [str(checkout / "dev"), "release", "now"]
    done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
    assert done.stderr == "dev: release: expected no arguments, got now\n"
    assert done.stdout.splitlines()[-1] == sys.base_prefix


def copy_of_checkout(folder: Path) -> Path:
    """What ./dev serve needs of a checkout, without the packages that were installed before."""
    checkout = folder / "checkout"
    unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in ("src", "tools"):
        shutil.copytree(ROOT / name, checkout / name, ignore=unwanted)
    for name in ("dev", "pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    return checkout


def test_the_first_start_says_how_long_it_takes_and_how_to_skip_it(tmp_path: Path) -> None:
    command, checkout = ["env", "-u", "HEADGATE_PURE", sys.executable, "dev", "serve"], copy_of_checkout(tmp_path)
    with subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        try:
            assert started.stdout is not None
            assert [started.stdout.readline() for _ in range(2)] == [
                "dev: HEADGATE_PURE=1 skips the compiling: headgate is slower then, and behaves the same\n",
                "dev: compiling the hot modules, usually a minute or two (0 s)\n",
            ]
        finally:
            os.killpg(started.pid, signal.SIGKILL)  # with pip, which it runs


@pytest.mark.long
def test_a_hub_starts_from_a_bare_checkout_without_compiling(tmp_path: Path) -> None:
    checkout = copy_of_checkout(tmp_path)
    command = [sys.executable, "dev", "serve", "--port", "0"]
    variables = os.environ | {"HEADGATE_PURE": "1"}
    with subprocess.Popen(command, cwd=checkout, env=variables, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None
            said = []
            for line in hub.stdout:
                said.append(line)
                if found := re.search(r"http://([\d.]+):(\d+)", line):
                    break
            else:
                pytest.fail(f"no hub: {said}")
            assert not [line for line in said if "compiling" in line]
            connection = HTTPConnection(found[1], int(found[2]), timeout=PATIENCE)
            connection.request("GET", "/live")
            assert connection.getresponse().status == 200
            connection.close()
            assert version(checkout / ".dev" / "run" / "bin", tmp_path) == PLAIN
            assert not (checkout / ".dev" / "wheel").exists()
            hub.terminate()
            hub.stdout.read()
            assert hub.wait(PATIENCE) == 0
        finally:
            hub.kill()
