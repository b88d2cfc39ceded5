"""Compiles the hot modules with mypyc. Where that isn't possible, headgate is installed as plain Python and says so."""

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

COMPILED = [
    "limits/decision.py",
    "limits/token_bucket.py",
    "limits/all_of.py",
    "limits/fixed.py",
    "limits/sliding_window.py",
    "limits/violations.py",
    "http/header_writer.py",
    "stores/memory.py",
    "stores/redis/protocol.py",
    "stores/redis/local_cache.py",
    "_limiter_hot.py",
    "gate/immutable_map.py",
    "gate/lookup.py",
    "gate/_hot.py",
]


class AllOrNone(build_ext):
    """Compiles every module, or none: they call each other, so that some without the others would not even import."""

    def run(self) -> None:
        try:
            super().run()
        except (BaseError, CCompilerError, OSError) as error:
            print(f"headgate: not compiled ({error}); installing as plain Python", file=sys.stderr)
            for built in self.get_outputs():
                Path(built).unlink(missing_ok=True)
            self.extensions = []


def extensions() -> list[Any]:
    """What to compile: nothing if HEADGATE_PURE=1, or where mypyc can't be had."""
    if os.environ.get("HEADGATE_PURE") == "1":
        return []
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("headgate: mypyc is not installed; installing as plain Python", file=sys.stderr)
        return []
    # What isn't compiled is checked elsewhere, with the libraries that it uses.
    options = ["--follow-imports=silent", "--ignore-missing-imports"]
    return mypycify([*options, *[f"src/headgate/{name}" for name in COMPILED]], opt_level="3", debug_level="0")


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNone})
