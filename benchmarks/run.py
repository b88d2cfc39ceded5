"""Measure headgate beside other rate limiters: `./dev bench [SUBJECT]`.

`memory` (the default) and `redis` compare the stores; `hub` compares a hub with and without its gate; `replay`
compares a replay with the parsing of the log; `edges` measures the cost of a limit on a FastAPI request; `holds`
compares a hold and its settling with a check; `accounts` compares a hold on five levels with a check and with LiteLLM.
This needs an environment with headgate as a compiled wheel and the dependency group `bench`; the floor also needs a C
compiler, and LiteLLM an environment of its own. The tables go to standard output, progress to standard error. A missed
bar is reported, but is not a failure: the speed of a machine tests nothing.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import accounts, edges, holds, hub_report, hub_suite, redis_report, redis_suite, replay
from benchmarks.contenders import NoFloorError, compile_floor
from benchmarks.report import Results, bars, markdown
from benchmarks.suite import FULL, QUICK, measure

SUBJECTS = ("memory", "redis", "hub", "replay", "edges", "holds", "accounts")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench", description="Measure headgate beside other rate limiters.")
    parser.add_argument("what", nargs="?", choices=SUBJECTS, default="memory", help="the subject")
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few seconds, rough figures")
    parser.add_argument("--no-floor", action="store_true", help="skip the floor, which needs mypyc and a compiler")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the Markdown to FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument("--write", action="store_true", help="also write the Markdown into docs/benchmarks.md")
    parser.add_argument("--litellm", type=Path, metavar="PYTHON", help="of an environment with LiteLLM (accounts)")
    options = parser.parse_args()
    results: (
        Results | redis_report.Results | hub_report.Results | replay.Results | edges.Results | holds.Results
        | accounts.Results
    )  # fmt: skip
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
    elif options.what == "holds":
        results = holds.measure(holds.QUICK if options.quick else holds.FULL)
        text, found = holds.markdown(results), holds.bars(results)
    elif options.what == "accounts":
        results = accounts.measure(accounts.QUICK if options.quick else accounts.FULL, options.litellm)
        text, found = accounts.markdown(results), accounts.bars(results)
    else:
        try:
            results = _in_memory(quick=options.quick, floor=not options.no_floor)
        except NoFloorError as error:
            print(f"{error}\nThe floor could not be compiled; --no-floor skips it.", file=sys.stderr)
            return 1
        text, found = markdown(results), bars(results)
    if options.write:
        write(options.what, text)
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        figures = {**asdict(results), "bars": [asdict(bar) for bar in found]}
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def write(subject: str, text: str, page: Path = PAGE) -> None:
    """Replace a subject's report on the page of benchmarks."""
    begin, end = f"<!-- {subject} benchmark -->", f"<!-- end of {subject} benchmark -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{page} has no place for the report: {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def _in_memory(*, quick: bool, floor: bool) -> Results:
    with TemporaryDirectory() as folder:
        return measure(QUICK if quick else FULL, compile_floor(Path(folder)) if floor else None)


if __name__ == "__main__":
    sys.exit(main())
