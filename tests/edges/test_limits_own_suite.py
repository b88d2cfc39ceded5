"""`limits`' own tests of storages and strategies, from its source package, on headgate's storages."""

import os
import subprocess
import sys
import tarfile
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.valkey import ValkeyServer

ROOT = Path(__file__).parents[2]
SUITE = Path(__file__).parent / "limits_suite"
TABLE: dict[str, Any] = tomllib.loads((SUITE / "table.toml").read_text(encoding="utf-8"))
CANNOT = {test for row in TABLE["cannot"] for test in row["tests"]}

NEEDED = ["flaky", "pymemcache", "pymongo", "pytest-asyncio", "pytest-lazy-fixtures", "valkey"]
"""What the suite imports, and the environment of our own tests hasn't."""
PLUGINS = ["flaky.flaky_pytest_plugin", "pytest_asyncio.plugin", "pytest_lazy_fixtures.plugin", "on_headgate"]
SETTINGS = ["-o", "addopts=", "-o", "asyncio_default_fixture_loop_scope=function"]
FILES = ["test_storage.py", "test_strategy.py", "storage", "aio", "integration/test_concurrency.py"]

CHANCES = 5
"""Its tests sleep and look at the clock: on a busy machine some have to be run again."""


def pip(*arguments: str) -> None:
    pins = {"PIP_CONSTRAINT": "constraints.txt", "PIP_BUILD_CONSTRAINT": "constraints.txt"}
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *arguments[:1], *quiet, "--no-deps", *arguments[1:]]
    subprocess.run(command, cwd=ROOT, env=os.environ | pins, check=True)


def run(suite: Path, packages: Path, server: str, *options: str) -> dict[str, bool]:
    """Which of the suite's tests passed."""
    path = [str(packages), str(SUITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "HEADGATE_TEST_SERVER": server,
    }
    report = suite / "report.xml"
    plugins = [word for plugin in PLUGINS for word in ("-p", plugin)]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *SETTINGS, f"--junitxml={report}", *options]
    subprocess.run([*command, *(f"tests/{file}" for file in FILES)], cwd=suite, env=env, check=False)
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": not list(case.iter("failure")) for case in cases}


@pytest.mark.long
def test_its_own_suite(tmp_path: Path) -> None:
    assert version("limits") == TABLE["version"]
    pip("download", "--no-binary", "limits", "--dest", str(tmp_path), f"limits=={TABLE['version']}")
    with tarfile.open(tmp_path / f"limits-{TABLE['version']}.tar.gz") as package:
        package.extractall(tmp_path, filter="data")
    packages = tmp_path / "packages"
    pip("install", "--target", str(packages), *NEEDED)
    with ValkeyServer() as server:
        suite = tmp_path / f"limits-{TABLE['version']}"
        passed = run(suite, packages, server.url)
        for _ in range(CHANCES):
            if not {test for test, good in passed.items() if not good} - CANNOT:
                break
            passed |= run(suite, packages, server.url, "--last-failed")
    assert {test for test, good in passed.items() if not good} == CANNOT
    assert sum(passed.values()) == TABLE["passed"]


@pytest.mark.once
def test_the_docs_state_the_result() -> None:
    text = " ".join((ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").split())
    passed = TABLE["passed"]
    assert f"{passed} of {passed + len(CANNOT)} pass" in text
    for row in TABLE["cannot"]:
        assert row["reason"] in text
        for test in row["tests"]:
            assert f"`{test.partition('[')[0].rpartition('.')[2]}`" in text
