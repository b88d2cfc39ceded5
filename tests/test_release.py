"""./dev release: what it finds wrong, and what it says to do. Running it is left to ./dev release itself."""

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from headgate._version import VERSION
from headgate.stores.memory_tables import compiled
from tools.environments import ROOT
from tools.release import check_changelog, check_names
from tools.smoke import find_version

pytestmark = pytest.mark.once

TODAY = date(2027, 3, 1)
CHANGES = "\n### Added\n\n- Something.\n\n"
GOOD = (
    f"# Changelog\n\nWhat changes.\n\n## Unreleased\n\n## 0.2.0 - 2027-03-01\n{CHANGES}## 0.1.0 - 2027-01-01\n{CHANGES}"
)


def test_a_finished_changelog_is_accepted() -> None:
    assert check_changelog(GOOD, "0.2.0", TODAY) == []
    assert check_changelog(GOOD.replace("## Unreleased\n\n", ""), "0.2.0", TODAY) == []
    assert check_changelog(GOOD.replace("2027-03-01", "2027-02-28"), "0.2.0", TODAY) == []


@pytest.mark.parametrize(
    ("text", "version", "mistake"),
    [
        (
            f"## Unreleased\n{CHANGES}", "0.1.0",
            'expected a section "## 0.1.0 - 2027-03-01", got none; rename "## Unreleased", or correct _version.py',
        ),
        (
            GOOD, "0.3.0",
            'expected a section "## 0.3.0 - 2027-03-01", got none; rename "## Unreleased", or correct _version.py',
        ),
        (
            GOOD.replace("## Unreleased\n", f"## Unreleased\n{CHANGES}"), "0.2.0",
            'expected nothing under "## Unreleased"; move it to 0.2.0, or raise the version',
        ),
        (GOOD, "0.1.0", "expected 0.1.0 as the newest version, got '0.2.0 - 2027-03-01'; raise VERSION in _version.py"),
        (
            GOOD.replace(f"0.2.0 - 2027-03-01\n{CHANGES}", "0.2.0 - 2027-03-01\n\n### Added\n\n"), "0.2.0",
            "expected the changes of 0.2.0, got an empty section",
        ),
        *[
            (
                GOOD.replace("0.2.0 - 2027-03-01", title), "0.2.0",
                f'expected a section "## 0.2.0 - 2027-03-01", or with an earlier date, got "## {title}"',
            )
            for title in ("0.2.0", "0.2.0 - soon", "0.2.0 - 2027-02-30", "0.2.0 - 2027-03-02", "0.2.0 (2027-03-01)")
        ],
        (
            f"## 0.2.0 - 2027-03-01\n{CHANGES}## 0.2.0 - 2027-02-01\n{CHANGES}", "0.2.0",
            "expected one section per version, got 2 of 0.2.0",
        ),
    ],
    ids=["no section", "another version", "forgotten", "older version", "empty", "no date", "not a date", "no such day",
         "tomorrow", "another form", "twice"],
)  # fmt: skip
def test_a_mistake_in_the_changelog_is_named_with_its_remedy(text: str, version: str, mistake: str) -> None:
    assert check_changelog(text, version, TODAY) == [f"CHANGELOG.md: {mistake}"]


def test_the_version_is_read_from_its_one_place() -> None:
    assert find_version() == VERSION


def test_a_release_has_an_sdist_and_a_compiled_wheel() -> None:
    sdist, wheel = "headgate-0.2.0.tar.gz", "headgate-0.2.0-cp311-cp311-linux_x86_64.whl"
    assert check_names([sdist, wheel], "0.2.0") == []
    plain = "headgate-0.2.0-py3-none-any.whl"
    assert check_names([sdist, plain], "0.2.0") == [
        f"dist/: expected one compiled wheel of 0.2.0, got {sdist}, {plain}; install gcc and python3-dev"
    ]
    assert check_names([wheel], "0.2.0") == [f"dist/: expected headgate-0.2.0.tar.gz, got {wheel}"]
    assert len(check_names([sdist, wheel], "0.3.0")) == 2


def smoke(version: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(ROOT / "tools" / "smoke.py"), version, "--hub"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_smoke_test_refuses_another_version(tmp_path: Path) -> None:
    done = smoke("9.9.9", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"headgate --version: expected 'headgate 9.9.9 (compiled)', got 'headgate {VERSION} ("
    )


@pytest.mark.long
@pytest.mark.skipif(not compiled(), reason="a release is compiled")
def test_the_smoke_test_tries_command_library_and_hub(tmp_path: Path) -> None:
    done = smoke(VERSION, tmp_path)
    assert (done.returncode, done.stdout) == (0, f"headgate {VERSION} works: command, library, hub\n"), done.stderr
