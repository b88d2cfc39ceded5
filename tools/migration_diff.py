"""Write the difference of the applications in examples/migration into docs/coming-from.md.

    python tools/migration_diff.py

A test keeps it up to date.
"""

import difflib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
GUIDE: Final = ROOT / "docs" / "coming-from.md"
APPS: Final = ROOT / "examples" / "migration"
BEFORE, AFTER = "slowapi_app.py", "headgate_app.py"
BEGIN, END = "```diff\n", "```\n"


def diff() -> str:
    before, after = ((APPS / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in (BEFORE, AFTER))
    return "".join(difflib.unified_diff(before, after, BEFORE, AFTER))


def shown() -> str:
    """The difference that the guide shows."""
    return _parts()[1]


def _parts() -> tuple[str, str, str]:
    """The guide before the difference, the difference, and the rest."""
    before, _, rest = GUIDE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, after = rest.partition(END)
    return before, found, after


if __name__ == "__main__":
    before, _, after = _parts()
    GUIDE.write_text(f"{before}{BEGIN}{diff()}{END}{after}", encoding="utf-8")
