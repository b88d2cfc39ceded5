"""Measure headgate beside other rate limiters: `python benchmarks/run.py`.

Needs an environment with headgate (as a compiled wheel), limits, throttled-py, pyrate-limiter, token-bucket, and, for
the floor, mypy, setuptools and a C compiler. The tables go to standard output, what is going on to standard error. A
bar that is missed is said, and is no failure: how fast a machine is tests nothing.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.contenders import NoFloorError, compile_floor
from benchmarks.report import bars, markdown
from benchmarks.suite import FULL, QUICK, measure


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure headgate beside other rate limiters.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few seconds, rough figures")
    parser.add_argument(
        "--no-floor", action="store_true", help="do without the floor, which needs mypyc and a compiler"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        try:
            make_floor = None if options.no_floor else compile_floor(Path(folder))
        except NoFloorError as error:
            print(f"{error}\nThe floor could not be compiled; --no-floor does without it.", file=sys.stderr)
            return 1
        results = measure(QUICK if options.quick else FULL, make_floor)
    text = markdown(results)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        figures = {**asdict(results), "bars": [asdict(bar) for bar in bars(results)]}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
