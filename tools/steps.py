"""The steps of ./dev test and ./dev long: each is run and timed, and summed up at the end."""

from __future__ import annotations  # lets an older Python reach the version check in ./dev

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tools.environments import DEV, build_wheel, call, environment

TOOLS = ("tools", "all", "dev")
"""The environment of the tests: its name, then extras and dependency groups of pyproject.toml."""


class Steps:
    """Runs every step, whatever became of those before it, and sums up."""

    def __init__(self) -> None:
        self.done: list[tuple[str, bool, float]] = []
        self.tests: Counter[str] = Counter()

    def run(self, name: str, step: Callable[..., int], *arguments: Any) -> None:
        print(f"\n== {name}", flush=True)
        start, passed = time.monotonic(), False
        try:
            passed = step(*arguments) == 0
        except SystemExit as failure:  # of stop()
            print(failure, flush=True)
        self.done.append((name, passed, time.monotonic() - start))

    def pytest(self, arguments: list[str], env: dict[str, str]) -> int:
        report = DEV / "report.xml"
        report.unlink(missing_ok=True)
        python = environment(*TOOLS) / "python"
        code = call([python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments], env)
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            tags = {part.tag for part in case}
            self.tests["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
        if code == 5 and "-n" not in arguments:  # nothing was selected
            return 0
        self.tests["failed"] += code > 1  # pytest itself failed
        return code

    def compiled(self, arguments: list[str], wheel: Callable[[], Path] = build_wheel) -> int:
        """Test the wheel as users get it: src/ is not on the path."""
        python = environment(*TOOLS, wheel=wheel()) / "python"
        check = "import headgate.limits.decision as it; print('testing', it.__file__); exit(it.__file__[-3:] != '.so')"
        return call([python, "-c", check]) or self.pytest(arguments, {})

    def summary(self) -> int:
        print("\n== summary")
        for name, passed, seconds in self.done:
            print(f"{'ok' if passed else 'FAILED':<8}{name:<24}{seconds:7.1f} s")
        skipped = f", {self.tests['skipped']} skipped" if self.tests["skipped"] else ""
        print(f"tests: {self.tests['passed']} passed, {self.tests['failed']} failed{skipped}", flush=True)
        return 0 if all(passed for _, passed, _ in self.done) else 1


def marked(expression: str, arguments: Sequence[str] = (), *, per_core: int = 2) -> list[str]:
    """pytest's arguments. All tests run in several processes, each with servers of its own; a selection runs in one.

    There are two processes per core, since many tests wait for a server most of the time. Attacks and floods don't, and
    would starve each other's servers.
    """
    processes = min(per_core * (os.cpu_count() or 1), 8)
    return ["-m", expression, *(arguments or ["-n", str(processes), "--dist", "worksteal"])]
