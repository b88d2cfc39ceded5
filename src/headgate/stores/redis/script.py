"""The script that decides in the server. Its parts are the files in lua/."""

import hashlib
from pathlib import Path
from typing import Final


def part(name: str) -> str:
    """The text of a file in lua/."""
    return (Path(__file__).parent / "lua" / name).read_text(encoding="utf-8")


def _function(name: str, body: str) -> str:
    """A part that becomes a function, which returns what the part returns."""
    return f"local function {name}()\n{body}end\n"


_MODULES: Final = {
    "draw_ahead": "draw_ahead.lua",
    "bucket": "bucket.lua",
    "window": "window.lua",
    "violations": "violations.lua",
}
_DECIDE: Final = "\n".join(
    [part("shared.lua"), *[_function(name, part(file)) for name, file in _MODULES.items()], part("decide.lua")]
)
SOURCE: Final = "\n".join([part("common.lua"), _function("decide", _DECIDE), part("plain.lua")]).encode()
DIGEST: Final = hashlib.sha1(SOURCE).hexdigest().encode()  # noqa: S324 - it is the name under which servers keep it
