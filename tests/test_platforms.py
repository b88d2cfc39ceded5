"""Other systems: the library needs nothing that Windows or macOS doesn't have. The hub needs POSIX, and says so."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

LOAD = """
import asyncio, importlib, pkgutil, subprocess, sqlite3, concurrent.futures, ssl, tomllib
import fastapi, httpx, redis.asyncio, starlette, textual.app, textual.widgets, websockets.asyncio.client
"""

HIDE = """
import os, signal, socket, sys

class Hidden:
    '''What only POSIX systems have.'''
    MODULES = {"fcntl", "grp", "posix", "pwd", "resource", "syslog", "termios", "tty", "pty", "uvloop"}

    def find_spec(self, name, path=None, target=None):
        if name in self.MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for module, names in {
    os: "register_at_fork fork getuid geteuid getgid fchmod fchown chown mkfifo waitpid WNOHANG O_CLOEXEC O_NONBLOCK",
    signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD alarm setitimer pthread_sigmask",
    socket: "AF_UNIX SO_REUSEPORT",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
"""

IMPORT = """
for name in Hidden.MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
import headgate

names = [found.name for found in pkgutil.walk_packages(headgate.__path__, "headgate.", onerror=lambda _: None)]
for name in names:
    if not name.startswith("headgate.hub.") and not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names) > 60, headgate.Limiter("5/minute").check("agent-7").remaining)
"""


SERVE = """
import os, sys
from headgate.cli import main
os.name = "nt"
sys.exit(main(["serve"]))
"""
POSIX_ONLY = "the hub needs a POSIX system, such as Linux or macOS; the library and the clients don't"


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout, done.stderr)  # for the report of a test that fails
    return done


@pytest.mark.long
def test_the_library_is_imported_where_there_is_no_posix() -> None:
    """The libraries that it uses are loaded before: they have to care for themselves."""
    assert run("-c", LOAD + HIDE + IMPORT).stdout == "True 4\n"


def test_the_hub_says_that_it_needs_posix() -> None:
    done = run("-c", SERVE)
    assert (done.returncode, done.stderr) == (1, f"{POSIX_ONLY}\n")


@pytest.mark.long
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_types_are_right_on_other_systems(platform: str, tmp_path: Path) -> None:
    """Names that a system doesn't have are unknown to mypy there."""
    source = Path(__file__).parents[1] / "src" / "headgate"
    parts = [str(one) for one in sorted(source.iterdir()) if one.name != "hub" and (one / "__init__.py").exists()]
    parts += [str(one) for one in source.glob("*.py")]
    options = ["--platform", platform, "--follow-imports=silent", f"--cache-dir={tmp_path}"]
    assert run("-m", "mypy", *options, *parts, cwd=source.parents[1]).returncode == 0
