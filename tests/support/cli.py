"""The command `headgate` in a process of its own: in a pipe, or on a pseudo-terminal."""

import argparse
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import headgate
from tests.support.hub import HubServer
from tests.support.valkey import PATIENCE

PACKAGES = Path(headgate.__file__).parents[1]
MODULE = [sys.executable, "-m", "headgate"]
DEADLINE = 5 * PATIENCE
"""Seconds for a program to come to its end: it has more to do than to say something."""


class CommandResult(NamedTuple):
    """What a command has come to."""

    code: int
    out: str
    err: str

    def expect_output(self) -> str:
        """Its output: it has succeeded, and told nothing else."""
        assert (self.code, self.err) == (0, ""), self
        return self.out

    def expect_error(self, code: int = 1) -> str:
        """Its errors: it has failed, and printed nothing."""
        assert (self.code, self.out) == (code, ""), self
        return self.err


Command = Callable[..., CommandResult]
"""Runs a command within this process."""
StartHub = Callable[..., AbstractContextManager[HubServer]]
"""Starts a hub that the commands find, until the block ends."""


def leaf_commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[str, list[argparse.Action]]]:
    """Every command that does something, with its arguments."""
    actions = [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction)]
    if parser.get_default("run") is not None:
        yield " ".join(words), actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from leaf_commands(below, (*words, name))


def command_environment(packages: Path = PACKAGES) -> dict[str, str]:
    """The same headgate as in this process, and nothing from outside that changes what is printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    return kept | {"PYTHONPATH": str(packages), "PYTHONUTF8": "1", "TERM": "xterm"}


def run_command(*arguments: str, command: list[str] = MODULE, packages: Path = PACKAGES, **options: Any) -> Any:
    """Run the command to its end, with the variables `more` too. The options are those of `subprocess.run`."""
    environment = command_environment(packages) | options.pop("more", {})
    chosen = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    if "input" not in chosen:
        chosen.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.run([*command, *arguments], env=environment, timeout=DEADLINE, check=False, **chosen)


@contextmanager
def command_process(
    *arguments: str, output: int = subprocess.PIPE, more: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command while it runs. It is not left running, whatever becomes of the test."""
    command, environment = [*MODULE, *arguments], command_environment() | (more or {})
    with subprocess.Popen(command, env=environment, text=True, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.kill()


class Terminal:
    """What headgate writes on a pseudo-terminal."""

    def __init__(self, rows: int = 24, columns: int = 100) -> None:
        self._master, self.slave = pty.openpty()
        termios.tcsetwinsize(self.slave, (rows, columns))
        self._written = b""

    @property
    def text(self) -> str:
        """What was written; the last character may be there in part only."""
        return self._written.decode(errors="replace").replace("\r\n", "\n")

    def wait_until(self, condition: Callable[[str], object]) -> None:
        """Read until something holds for what was written."""
        deadline = time.monotonic() + PATIENCE
        while not condition(self.text):
            assert self._read(deadline), f"it ended after {self.text[-1000:]!r}"

    def _read(self, deadline: float) -> bool:
        """Wait for more, and say whether there was any before the end."""
        ready, _, _ = select.select([self._master], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"nothing more came in time after {self.text[-1000:]!r}"
        try:
            more = os.read(self._master, 65536)
        except OSError:  # how Linux says that the other side is closed
            more = b""
        self._written += more
        return bool(more)

    def close(self) -> None:
        """Both ends, where nothing was run."""
        os.close(self._master)
        os.close(self.slave)

    @contextmanager
    def process(self, *arguments: str, more: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """The command while it writes here. What it has not written by then is read at the end."""
        with command_process(*arguments, output=self.slave, more=more) as process:
            os.close(self.slave)
            yield process
            deadline = time.monotonic() + DEADLINE
            while self._read(deadline):
                pass
            assert process.wait(DEADLINE) == 0
        os.close(self._master)


def run_on_terminal(*arguments: str, rows: int = 24, columns: int = 100, more: dict[str, str] | None = None) -> str:
    """All that is written on a terminal of this size, with these environment variables too."""
    terminal = Terminal(rows, columns)
    with terminal.process(*arguments, more=more):
        pass
    return terminal.text
