"""Tries an installed headgate: python -P tools/smoke.py [VERSION] [--hub], with the Python that it is installed for.

It uses the standard library alone. ./dev release and the workflow for wheels run it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import threading
from http.client import HTTPConnection
from pathlib import Path

SECONDS = 60  # to wait for a hub on a busy machine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("version", nargs="?", default=find_version(), help="expected; by default that of the checkout")
    parser.add_argument("--hub", action="store_true", help="start one, too")
    options = parser.parse_args()
    program = Path(sysconfig.get_path("scripts"), "headgate.exe" if os.name == "nt" else "headgate")
    try_command(program, options.version)
    try_library()
    if options.hub:
        try_hub(program, options.version)
    print(f"headgate {options.version} works: {'command, library, hub' if options.hub else 'command, library'}")


def find_version() -> str:
    """The version of the checkout that this file is in."""
    source = Path(__file__).parents[1] / "src" / "headgate" / "_version.py"
    (version,) = re.findall(r'^VERSION: Final = "(.+)"$', source.read_text(encoding="utf-8"), re.MULTILINE)
    return str(version)


def try_command(program: Path, version: str) -> None:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    expect("headgate --version", f"headgate {version} (compiled)", said)


def try_library() -> None:
    from headgate import Limiter, per_minute

    limiter = Limiter(per_minute(60, burst=2))
    expect("three checks with a burst of 2", [True, True, False], [bool(limiter.check("agent-7")) for _ in range(3)])


def try_hub(program: Path, version: str) -> None:
    """Start a hub, ask for its health, and stop it."""
    with tempfile.TemporaryDirectory() as data:
        command = [str(program), "serve", "--port", "0", "--data", str(Path(data, "hub"))]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as hub:
            overdue = threading.Timer(SECONDS, hub.kill)
            overdue.start()
            try:
                assert hub.stdout is not None
                line = next((line for line in hub.stdout if "http://" in line), "")
                found = re.search(r"http://([\d.]+):(\d+)", line)
                if found is None:
                    sys.exit("headgate serve: expected a line with its address, got none; its log is above")
                connection = HTTPConnection(found[1], int(found[2]), timeout=SECONDS)
                connection.request("GET", "/health")
                health = json.load(connection.getresponse())
                expect("GET /health", ("ok", version), (health.get("status"), health.get("version")))
                hub.terminate()
                hub.stdout.read()
                expect("exit code after SIGTERM", 0, hub.wait())
            finally:
                overdue.cancel()
                hub.kill()


def expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        sys.exit(f"{what}: expected {expected!r}, got {got!r}")


if __name__ == "__main__":
    main()
