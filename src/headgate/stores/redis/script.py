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


def _module(name: str, body: str) -> str:
    """A part that is made when it is first needed."""
    made = f"made_{name}"
    body = f"if not {made} then\n{made} = (function()\n{body}end)()\nend\nreturn {made}\n"
    return f"local {made}\n{_function(name, body)}"


_MODULES: Final = (
    "headroom",
    "release",
    "draw_ahead",
    "bucket",
    "window",
    "budget",
    "slots",
    "meter",
    "violations",
    "holds",
)  # each may use those before it
_DECIDE: Final = "\n".join(
    [part("shared.lua"), *[_module(name, part(f"{name}.lua")) for name in _MODULES], part("decide.lua")]
)
_LEAN: Final = f"local others\nlocal lean\nlean = function(...)\n{part('lean.lua')}end\n"
SOURCE: Final = "\n".join([part("common.lua"), _LEAN, _function("decide", _DECIDE), part("plain.lua")]).encode()
DIGEST: Final = hashlib.sha1(SOURCE).hexdigest().encode()  # noqa: S324 - it is the name under which servers keep it
