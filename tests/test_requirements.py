"""Every statement of docs/requirements.md has a test whose name contains its number."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
STATEMENTS = re.findall(r"^([A-F]\d+)\. ", PAGE, re.MULTILINE)
PLANNED = ("F2", "F3")  # as the page says


def test_every_statement_has_a_test_that_carries_its_number() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    carried = {number.upper() for number in re.findall(r"def test_(?:\w+_)??([a-f]\d+)_", tests)}
    assert [number for number in STATEMENTS if number not in carried] == list(PLANNED)


def test_the_page_has_all_statements() -> None:
    counts = {letter: sum(number[0] == letter for number in STATEMENTS) for letter in "ABCDEF"}
    assert counts == {"A": 13, "B": 11, "C": 5, "D": 5, "E": 7, "F": 4}
