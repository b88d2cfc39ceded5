"""Sphinx's settings for the documentation site: ./dev docs. See decisions/0013-documentation.md."""

import re
import shutil
from pathlib import Path
from typing import Any

project = "headgate"
extensions = ["myst_parser"]
root_doc = "README"
html_theme = "furo"
html_title = "headgate"
html_show_copyright = False
html_show_sphinx = False
myst_heading_anchors = 4


def add_navigation(app: Any, name: str, source: list[str]) -> None:
    """Make a table of contents of each section of the index: the pages that it links to.

    Forges show a toctree directive as code, so the index holds none. A page that the index doesn't link to is reported
    as an orphan.
    """
    if name == root_doc:
        sections = re.split(r"^## ", source[0], flags=re.MULTILINE)
        for section in sections[1:]:
            title = section.partition("\n")[0]
            pages = dict.fromkeys(re.findall(r"\]\(([^)#:]+)\.md\)", section))
            if pages:
                source[0] += "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```\n"])


def copy_index(app: Any, error: Exception | None) -> None:
    """Web servers look for index.html."""
    if error is None:
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", copy_index)
