"""Compiles the hot modules with mypyc. Where that isn't possible, headgate is installed as plain Python and says so."""

import os
import sys
from typing import Any

from setuptools import setup

COMPILED = [
    "core.py",
    "limits.py",
    "windows.py",
    "violations.py",
    "plan.py",
    "checks.py",
    "stores/memory.py",
]


def extensions() -> list[Any]:
    """What to compile: nothing if HEADGATE_PURE=1, or where mypyc can't be had."""
    if os.environ.get("HEADGATE_PURE") == "1":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("headgate: mypyc is not installed; installing as plain Python", file=sys.stderr)
        return []
    modules = mypycify([f"src/headgate/{name}" for name in COMPILED], opt_level="3", debug_level="0")
    for module in modules:
        module.optional = True  # no compiler: go on without it
    return modules


setup(ext_modules=extensions())
