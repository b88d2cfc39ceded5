"""The package: it has no dependencies, states its version once, and installs without a compiler."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import headgate
from headgate._version import VERSION
from tools.environments import requirements

ROOT = Path(__file__).parents[1]
PACKAGE = Path(headgate.__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_headgate_needs_nothing_but_python(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "headgate")
    for library in PACKAGE.parent.glob("*__mypyc.*.so"):  # what the compiled modules share stands beside the package
        shutil.copy(library, tmp_path)
    program = f"""
import json, sys
sys.path.insert(0, {str(tmp_path)!r})
import headgate, headgate.cli
print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]))
"""
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    files = [Path(file) for file in json.loads(result.stdout)]
    own = [file for file in files if file.is_relative_to(tmp_path)]
    assert tmp_path / "headgate" / "__init__.py" in own
    assert [file for file in files if file not in own and {"site-packages", "dist-packages"} & set(file.parts)] == []


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT["project"]
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "headgate._version.VERSION"}
    installed = [info.name for info in PACKAGE.parent.glob("headgate-*.dist-info")]
    assert installed == ([] if PACKAGE.parent == ROOT / "src" else [f"headgate-{VERSION}.dist-info"])


def test_nothing_is_required() -> None:
    assert PROJECT["project"]["dependencies"] == []


def test_dev_installs_the_extras_and_dependency_groups_of_the_project() -> None:
    extras, groups = PROJECT["project"]["optional-dependencies"], PROJECT["dependency-groups"]
    assert requirements("client") == sorted(extras["client"])
    assert set(requirements("server")) == {*extras["redis"], *extras["server"]} - {"headgate[redis]"}
    everything = set(requirements("all"))
    assert everything == {one for name in extras for one in extras[name] if not one.startswith("headgate[")}
    plain = {one for name in groups if name not in ("bench", "litellm") for one in groups[name] if isinstance(one, str)}
    assert set(requirements("all", "dev")) == everything | plain
    assert set(requirements("bench")) == {one for one in groups["bench"] if isinstance(one, str)} | set(groups["peers"])


def test_every_package_that_dev_installs_is_pinned() -> None:
    def name(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\[;<>=! ]", requirement)[0]).lower()

    def missing(wanted: list[str], pins: str) -> list[str]:
        pinned = {name(line) for line in (ROOT / pins).read_text().splitlines() if "==" in line}
        return [one for one in wanted if name(one) not in pinned]

    groups = [one for one in PROJECT["dependency-groups"] if one != "litellm"]  # it has an environment of its own
    names = [*PROJECT["project"]["optional-dependencies"], *groups]
    assert missing([*requirements(*names), *PROJECT["build-system"]["requires"]], "constraints.txt") == []
    assert missing(requirements("redis", "litellm"), "constraints-litellm.txt") == []


def no_compiler(folder: Path) -> dict[str, str]:
    """Surroundings in which no compiler can be found."""
    return {"PATH": str(folder), "CC": "no-such-compiler", "CXX": "no-such-compiler"}


def half_a_compiler(folder: Path) -> dict[str, str]:
    """Surroundings whose compiler fails on the file that holds the code, and not on the small ones around it."""
    program = folder / "half-a-compiler"
    program.write_text(f'#!/bin/sh\ncase "$*" in *__native_*) exit 1 ;; esac\nexec {shutil.which("gcc")} "$@"\n')
    program.chmod(0o755)
    return {"CC": str(program), "CXX": str(program)}


@pytest.mark.long
@pytest.mark.parametrize("compiler", [no_compiler, half_a_compiler])
def test_without_a_compiler_headgate_installs_as_plain_python(
    tmp_path: Path, compiler: Callable[[Path], dict[str, str]]
) -> None:
    source, home, nowhere = tmp_path / "source", tmp_path / "home", tmp_path / "nowhere"
    unwanted = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", source / "src", ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    nowhere.mkdir()
    venv.create(home, symlinks=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HEADGATE_PURE")}
    without = kept | compiler(nowhere)
    pins = {"PIP_CONSTRAINT": "constraints.txt", "PIP_BUILD_CONSTRAINT": "constraints.txt"}
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "--quiet", "--no-input"]
    subprocess.run([*pip, "install", str(source)], cwd=ROOT, env=without | pins, check=True)

    def run(*command: str) -> str:
        program = [str(home / "bin" / command[0]), *command[1:]]
        return subprocess.run(program, cwd=tmp_path, env=without, capture_output=True, text=True, check=True).stdout

    assert run("headgate", "--version") == f"headgate {VERSION} (plain Python: not compiled)\n"
    check = "import headgate; limiter = headgate.Limiter('1/minute'); print([bool(limiter.check('a')) for _ in 'ab'])"
    assert run("python", "-c", check) == "[True, False]\n"
    assert [path for path in home.rglob("*.so") if "headgate" in str(path) or "mypyc" in path.name] == []
