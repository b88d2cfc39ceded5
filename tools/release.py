"""./dev release: builds the sdist and the wheel into dist/, and checks them and the changelog. It publishes nothing."""

from __future__ import annotations  # lets an older Python reach the version check in ./dev

import re
import shutil
import venv
from datetime import date
from pathlib import Path

from tools.environments import DEV, PINS, ROOT, call, copy_source, pip, read, say
from tools.smoke import find_version

DIST = ROOT / "dist"
UNRELEASED = "Unreleased"


def check_release(tools: Path) -> int:
    """Build and check everything, say what is wrong and what to do, and return an exit code."""
    version = find_version()
    wrong = check_changelog(read(ROOT / "CHANGELOG.md"), version, date.today())
    shutil.rmtree(DIST, ignore_errors=True)
    building = "building the sdist and the wheel, usually about two minutes"
    if call([tools / "pyproject-build", "-q", "-o", DIST, copy_source()], PINS, building):
        wrong.append("building failed: its output is above")
    else:
        files = sorted(DIST.iterdir())
        wrong += check_names([file.name for file in files], version)
        if call([tools / "twine", "check", "--strict", *files]):
            wrong.append("twine refuses the metadata: its output is above; correct pyproject.toml or README.md")
        wrong += [f"{file.name} doesn't work: the output is above" for file in files if not works(file, version)]
    for one in wrong:
        say(f"wrong: {one}")
    if wrong:
        say(f"headgate {version} can't be released yet")
        return 1
    say(f"headgate {version} can be released; nothing was published. Wheels for all systems come from the workflow")
    say(f"`wheels`: git tag v{version}, push the tag, and collect them there. This one is for this system alone.")
    return 0


def check_changelog(text: str, version: str, today: date) -> list[str]:
    """What has to be changed in the changelog before a version can be released."""
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    sections = dict(zip(titles, re.split(r"^## .+$", text, flags=re.MULTILINE)[1:], strict=True))
    wanted = f'"## {version} - {today}"'
    released = [title for title in titles if title != UNRELEASED]
    mine = [title for title in released if title.split(" ")[0] == version]
    wrong = []
    if not mine:
        wrong.append(f'expected a section {wanted}, got none; rename "## {UNRELEASED}", or correct _version.py')
    elif is_written(sections.get(UNRELEASED, "")):
        wrong.append(f'expected nothing under "## {UNRELEASED}"; move it to {version}, or raise the version')
    if mine and not is_written(sections[mine[0]]):
        wrong.append(f"expected the changes of {version}, got an empty section")
    if mine and released[0] != mine[0]:
        wrong.append(f"expected {version} as the newest version, got {released[0]!r}; raise VERSION in _version.py")
    wrong += [f"expected one section per version, got {len(mine)} of {version}"] if len(mine) > 1 else []
    for title in mine:
        found = re.fullmatch(r"\S+ - (\d{4}-\d\d-\d\d)", title)
        try:
            if found is None or date.fromisoformat(found[1]) > today:
                raise ValueError
        except ValueError:
            wrong.append(f'expected a section {wanted}, or with an earlier date, got "## {title}"')
    return [f"CHANGELOG.md: {one}" for one in wrong]


def is_written(section: str) -> bool:
    """Whether a section has anything but headings."""
    return any(line.strip() and not line.startswith("#") for line in section.splitlines())


def check_names(names: list[str], version: str) -> list[str]:
    """Whether there are an sdist and a compiled wheel of the version."""
    wrong = []
    if f"headgate-{version}.tar.gz" not in names:
        wrong.append(f"dist/: expected headgate-{version}.tar.gz, got {', '.join(names)}")
    wheels = [name for name in names if name.startswith(f"headgate-{version}-") and name.endswith(".whl")]
    if len(wheels) != 1 or "-none-any" in wheels[0]:
        wrong.append(
            f"dist/: expected one compiled wheel of {version}, got {', '.join(names)}; install gcc and python3-dev"
        )
    return wrong


def works(file: Path, version: str) -> bool:
    """Install an sdist or a wheel into a fresh environment, and try it there."""
    home = DEV / "release"
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    try:
        pip("install", f"{file}[server]", into=home, doing=f"installing {file.name} into a fresh environment")
    except SystemExit as failure:  # of stop()
        say(str(failure))
        return False
    return call([home / "bin" / "python", "-P", "tools/smoke.py", version, "--hub"]) == 0
