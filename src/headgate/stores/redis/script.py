"""The script that decides in the server. Its parts are the .lua files beside this one."""

import hashlib
from pathlib import Path
from typing import Final


def part(name: str) -> str:
    """The text of a .lua file."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _module(name: str, file: str) -> str:
    """A part that becomes a function of the script, which returns what the part returns."""
    return f"local function {name}()\n{part(file)}end\n"


SOURCE: Final = "\n".join(
    [
        part("common.lua"),
        _module("leasing", "leases.lua"),
        _module("bucket", "bucket.lua"),
        _module("window", "window.lua"),
        _module("violations", "violations.lua"),
        part("decide.lua"),
    ]
).encode()
DIGEST: Final = hashlib.sha1(SOURCE).hexdigest().encode()  # noqa: S324 - it is the name under which servers keep it
