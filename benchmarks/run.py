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
from types import ModuleType
from typing import Any

if __name__ == "__main__":  # Python puts this folder on the path; the modules are named from the folder above it
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import accounts, edges, holds, hub_report, hub_suite, redis_report, redis_suite, replay, report, suite
from benchmarks.contenders import NoFloorError, compile_floor

SUBJECTS: dict[str, tuple[ModuleType, ModuleType]] = {
    "memory": (suite, report),
    "redis": (redis_suite, redis_report),
    "hub": (hub_suite, hub_report),
    "replay": (replay, replay),
    "edges": (edges, edges),
    "holds": (holds, holds),
    "accounts": (accounts, accounts),
}
"""The module that measures a subject, and the one that reports it."""
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
    measures, reports = SUBJECTS[options.what]
    more: list[Any] = [options.litellm] if options.what == "accounts" else []
    with TemporaryDirectory() as folder:
        if options.what == "memory":
            try:
                more = [None if options.no_floor else compile_floor(Path(folder))]
            except NoFloorError as error:
                print(f"{error}\nThe floor could not be compiled; --no-floor skips it.", file=sys.stderr)
                return 1
        results = measures.measure(measures.QUICK if options.quick else measures.FULL, *more)
    text, found = reports.markdown(results), reports.bars(results)
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


if __name__ == "__main__":
    sys.exit(main())
