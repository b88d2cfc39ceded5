"""Files that are watched while they change."""

from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Replace a file at once, so that whoever reads it by himself never finds half of it."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
