"""Compiles the hot modules with mypyc. Where that isn't possible, headgate is installed as plain Python and says so."""

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

COMPILED = [
    "limits/decision.py",
    "limits/headroom.py",
    "limits/periods.py",
    "limits/meter.py",
    "limits/token_bucket.py",
    "limits/all_of.py",
    "limits/budget.py",
    "limits/fixed.py",
    "limits/sliding_window.py",
    "limits/slots.py",
    "limits/violations.py",
    "http/header_writer.py",
    "stores/asks.py",
    "stores/hold_terms.py",
    "stores/memory_tables.py",
    "stores/held.py",
    "stores/memory_pieces.py",
    "stores/memory_holds.py",
    "stores/remembered_holds.py",
    "stores/memory.py",
    "stores/redis/shapes.py",
    "stores/redis/keys.py",
    "stores/redis/protocol.py",
    "stores/redis/hold_requests.py",
    "stores/redis/local_cache.py",
    "_hold_hot.py",
    "hold_attempt.py",
    "_limiter_hot.py",
    "gate/immutable_map.py",
    "gate/lookup.py",
    "gate/_hot.py",
    "gate/account_asks.py",
    "gate/account_holds.py",
    "gate/hold_templates.py",
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
    made = mypycify([*options, *[f"src/headgate/{name}" for name in COMPILED]], opt_level="3", debug_level="0")
    for source in {source for extension in made for source in extension.sources}:
        add_docstrings(Path(source))
    if sys.platform == "linux":  # elsewhere calls within a library are direct anyway
        for extension in made:
            extension.extra_compile_args.append("-fno-semantic-interposition")
    return made


# mypyc writes the signatures of classes and functions into their docstrings, but not the docstrings themselves.


def add_docstrings(source: Path) -> None:
    """Add the docstrings of the compiled modules to a file of C that mypyc has made."""
    docs: dict[str, str] = {}
    modules: dict[str, str] = {}
    for name in COMPILED:
        tree = ast.parse(Path("src/headgate", name).read_text(encoding="utf-8"))
        modules[f"headgate/{name}"[:-3].replace("/", ".")] = c_string(tree)
        docs |= docstrings(Path(name).stem, tree)
    text = source.read_text(encoding="utf-8")
    string = r'PyDoc_STR\("(?:[^"\\]|\\.)*'
    for pattern in (
        rf'(\(PyCFunction\)CPyPy_(\w+),[^"{{}}]*?{string})(")',
        rf'(PyTypeObject CPyType_(\w+)_template_ = {{[^{{}}]*?\.tp_doc = {string})(")',
    ):
        text = re.sub(pattern, lambda found: found[1] + docs.get(found[2], "") + found[3], text)
    properties = r"(\(getter\)(\w+),\s*(?:NULL|\(setter\)\w+),\s*)NULL(, NULL})"
    text = re.sub(properties, lambda found: found[1] + quoted(docs.get(found[2])) + found[3], text)
    heads = r'(PyModuleDef_HEAD_INIT,\s*"([\w.]+)",\s*)NULL(, /\* docstring \*/)'
    text = re.sub(heads, lambda found: found[1] + quoted(modules.get(found[2])) + found[3], text)
    source.write_text(text, encoding="utf-8")


def docstrings(module: str, tree: ast.AST, owner: str = "") -> dict[str, str]:
    """The docstrings of the classes and functions in a module, by the names that mypyc gives them in C."""
    found = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name = ".".join(filter(None, (module, owner, node.name))).replace("___", "___3_").replace(".", "___")
            found[name] = c_string(node)
            if isinstance(node, ast.ClassDef):
                found |= docstrings(module, node, node.name)
            elif any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
                found[f"{module}___{owner}_get_{node.name}"] = c_string(node)
    return found


def c_string(node: Any) -> str:
    """A docstring as it is written between quotes in C."""
    plain = {chr(code) for code in range(32, 127)} - set('"\\?')
    text = ast.get_docstring(node) or ""
    return "".join([chr(byte) if chr(byte) in plain else f"\\{byte:03o}" for byte in text.encode()])


def quoted(text: str | None) -> str:
    return f'"{text}"' if text else "NULL"


setup(ext_modules=extensions(), cmdclass={"build_ext": AllOrNone})
