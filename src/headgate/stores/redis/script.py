"""The script that decides in the server. Its parts are the files in lua/."""

import hashlib
import re
from pathlib import Path
from typing import Final


def part(name: str) -> str:
    """The text of a file in lua/."""
    return (Path(__file__).parent / "lua" / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """A part that is made when it is first needed."""
    made = f"made_{name}"
    make = f"{made} = {made} or (function()\n{part(f'{name}.lua')}end)()"
    return f"local {made}\nlocal function {name}()\n{make}\nreturn {made}\nend\n"


_MODULES: Final = ("release", "draw_ahead", "bucket", "window", "budget", "slots", "meter", "violations", "holds")
"""Of decide.lua. Each may use those before it."""
_FUNCTIONS: Final = {
    "check_all_lua": part("check_all.lua"),
    "headroom_lua": part("headroom.lua"),
    "lean_lua": part("lean.lua"),
    "decide_lua": "\n".join([part("shared.lua"), *map(_module, _MODULES), part("decide.lua")]),
}
"""The words that stand for them in plain.lua."""


def with_functions(text: str) -> str:
    """A text with the functions that names stand for in it. No other word is one, in a comment neither."""
    names = "|".join(_FUNCTIONS)
    return re.sub(rf"\b({names})\b", lambda name: f"(function(...)\n{_FUNCTIONS[name[0]]}end)", text)


SOURCE: Final = (part("common.lua") + with_functions(part("plain.lua"))).encode()
DIGEST: Final = hashlib.sha1(SOURCE).hexdigest().encode()  # noqa: S324 - it is the name under which servers keep it
