"""Resetting parts in a forked process."""

import subprocess
import sys

PROGRAM = """
import os
from headgate.lifecycle import after_fork

told = []

class Part:
    def __init__(self, name, worse=None):
        self.name, self.worse = name, worse
        after_fork(self)

    def _after_fork(self):
        after_fork(self)  # as one does that makes the same steps again
        told.append(self.name)
        if self.worse:
            raise self.worse

def fork(then):
    child = os.fork()
    if child == 0:
        then()
        os._exit(0)
    os.waitpid(child, 0)

"""


def run_steps(steps: str) -> tuple[list[str], str]:
    """The output and the log of a program that makes some steps."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + steps], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines(), done.stderr


def test_each_part_is_reset_once_in_order_and_only_in_the_child() -> None:
    steps = "parts = [Part(name) for name in 'abcdefgh']\nfork(lambda: print(*told, flush=True))\nprint(told)"
    assert run_steps(steps) == (["a b c d e f g h", "[]"], "")


def test_parts_are_reset_in_the_child_of_a_child_too() -> None:
    steps = "part = Part('a')\nfork(lambda: fork(lambda: print(*told, flush=True)))"
    assert run_steps(steps) == (["a a"], "")


def test_registration_keeps_no_part_alive() -> None:
    steps = "part, other = Part('a'), Part('b')\ndel part\nfork(lambda: print(*told, flush=True))\n"
    steps += "del other\nfork(lambda: print(*told, flush=True))"
    assert run_steps(steps) == (["b", ""], "")


def test_a_part_that_fails_does_not_keep_others_from_being_reset() -> None:
    steps = "parts = Part('a', OSError('no threads')), Part('b')\nfork(lambda: print(*told, flush=True))"
    lines, log = run_steps(steps)
    assert lines == ["a b"]
    assert "could not reset a Part in a forked process" in log
    assert "OSError: no threads" in log
