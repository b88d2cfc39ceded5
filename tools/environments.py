"""The virtual environments of ./dev, and the wheel that is installed into them.

Everything is in .dev/, stamped with a digest of its ingredients, and is rebuilt when one of them changes. This runs
before anything is installed, so it uses the standard library alone.
"""

from __future__ import annotations  # lets an older Python reach the version check in ./dev

import hashlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
DEV = ROOT / ".dev"
CONSTRAINTS = "constraints.txt"


def pins(constraints: str) -> dict[str, str]:
    """Variables by which pip installs the versions that a file lists."""
    # They reach isolated builds too; the second is for pip 25.3 and later. pip would split a full path at a space.
    return {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}


PINS = pins(CONSTRAINTS)


def environment(name: str, *groups: str, wheel: Path | None = None, constraints: str = CONSTRAINTS) -> Path:
    """The bin/ of an environment with these extras and dependency groups, and with the wheel if one is given.

    `constraints` is the file that has their versions.
    """
    home, packages = DEV / name, requirements(*groups)
    stamp = digest(packages, read(ROOT / constraints), sys.version, sys.base_prefix)
    if read(home / "stamp") != stamp:
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, symlinks=True)  # without pip, which Debian has taken out of venv
        doing = f"installing packages into .dev/{name}"
        pip("install", "--no-compile", *packages, into=home, doing=doing, constraints=constraints)
        (home / "stamp").write_text(stamp)
    if wheel and read(home / "wheel-stamp") != digest(wheel.read_bytes()):
        source_link(home).unlink(missing_ok=True)
        pip("install", "--no-deps", "--force-reinstall", str(wheel), into=home, doing=f"installing {wheel.name}")
        (home / "wheel-stamp").write_text(digest(wheel.read_bytes()))
    return home / "bin"


def source_environment(name: str, *groups: str) -> Path:
    """The same environment with src/ in place of the wheel: nothing is compiled."""
    bin_ = environment(name, *groups)
    home, program = bin_.parent, bin_ / "headgate"
    if read(home / "wheel-stamp") != "src":
        if any(source_link(home).parent.glob("headgate-*.dist-info")):
            pip("uninstall", "--yes", "headgate", into=home, doing="removing the compiled headgate")
        source_link(home).write_text(f"{ROOT / 'src'}\n")
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(bin_ / "python"))} -P -m headgate "$@"\n')
        program.chmod(0o755)
        (home / "wheel-stamp").write_text("src")
    return bin_


def source_link(home: Path) -> Path:
    """The file that puts src/ on the path of an environment."""
    (packages,) = home.glob("lib/python*/site-packages")
    return packages / "headgate-src.pth"


def requirements(*groups: str) -> list[str]:
    """The packages of extras and dependency groups, from pyproject.toml."""
    import tomllib  # new in Python 3.11

    project = tomllib.loads(read(ROOT / "pyproject.toml"))
    tables = project["project"]["optional-dependencies"] | project["dependency-groups"]
    found = []
    for entry in [entry for group in groups for entry in tables[group]]:
        if isinstance(entry, dict):
            found += requirements(entry["include-group"])
        elif entry.startswith("headgate["):  # extras of headgate itself
            found += requirements(*entry[len("headgate[") : -1].split(","))
        else:
            found.append(entry)
    return sorted(set(found))


def build_wheel(hint: str = "") -> Path:
    """The wheel of the present source; plain Python where it can't be compiled. `hint` is said if it takes a while."""
    source, home = copy_source(), DEV / "wheel"
    files = [(str(path), path.read_bytes()) for path in sorted(source.rglob("*")) if path.is_file()]
    stamp = digest(files, read(ROOT / CONSTRAINTS), sys.version, sys.base_prefix)
    if read(home / "stamp") != stamp:
        shutil.rmtree(home, ignore_errors=True)
        doing = "compiling the hot modules, usually a minute or two"
        if hint:
            say(hint)
        pip("wheel", "--no-deps", "--wheel-dir", str(home), str(source), doing=doing)
    (wheel,) = home.glob("*.whl")
    if any("__mypyc" in name for name in zipfile.ZipFile(wheel).namelist()):
        (home / "stamp").write_text(stamp)
    else:  # without a stamp the next run tries again: a compiler may have been installed
        say("headgate is not compiled but plain Python. Are gcc and the Python headers installed (python3-dev)?")
        say(f"the compiler's output: {sys.executable} -m pip wheel -v --no-deps -w .dev/wheel .dev/source")
    return wheel


def package_of(revision: str) -> Path:
    """A folder with the compiled package of another revision of this repository, to be put on the path."""
    command = ["git", "rev-parse", "--verify", f"{revision}^{{commit}}"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    if found.returncode:
        stop(f"expected a revision of this repository, got {revision!r}: {found.stderr.strip()}")
    commit = found.stdout.strip()
    home = DEV / "versions" / commit[:12]
    if not (home / "package").exists():
        shutil.rmtree(home, ignore_errors=True)
        archive = subprocess.run(["git", "archive", commit], capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(home / "source", filter="data")
        target = ("--no-deps", "--target", str(home / "building"))
        pip("install", *target, str(home / "source"), doing=f"compiling {revision}")
        (home / "building").rename(home / "package")  # now it is whole
    return home / "package"


def copy_source() -> Path:
    """A copy of the package without the output of earlier builds."""
    source = DEV / "source"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def pip(verb: str, *arguments: str, into: Path | None = None, doing: str, constraints: str = CONSTRAINTS) -> None:
    """Run the pip of this Python, but never on this Python's own packages."""
    if find_spec("pip") is None:
        stop(f"{sys.executable} has no pip (apt install python3-pip)")
    where = ["--python", str(into / "bin" / "python")] if into else []
    how = ["-qq", "--no-input", "--disable-pip-version-check"]
    if call([sys.executable, "-m", "pip", *where, verb, *how, *arguments], pins(constraints), doing):
        stop(f"pip {verb} failed; its output is above")


def call(command: Sequence[str | Path], env: dict[str, str] | None = None, doing: str = "") -> int:
    """Run a command and return its exit code. `doing` describes a silent one, and is printed every five seconds."""
    sys.stdout.flush()
    start = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=os.environ | (env or {})) as process:
        while doing and process.poll() is None:
            say(f"{doing} ({time.monotonic() - start:.0f} s)")
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
    return process.returncode


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def say(text: str) -> None:
    print(f"dev: {text}", flush=True)


def stop(text: str) -> NoReturn:
    sys.exit(f"dev: {text}")
