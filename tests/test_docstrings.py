"""Docstrings are there for `help()` and editors, in the compiled modules too."""

import ast
import importlib
import pydoc
from pathlib import Path
from typing import Any

import pytest

import headgate
from headgate import Limiter, TokenBucket

PACKAGE = Path(headgate.__file__).parent
COMPILED = [
    *("limits/decision.py", "limits/token_bucket.py", "limits/all_of.py", "limits/sliding_window.py"),
    *("limits/budget.py", "limits/slots.py", "limits/violations.py", "http/header_writer.py", "stores/memory.py"),
    *("_hold_hot.py", "_limiter_hot.py", "gate/_hot.py"),
    *("gate/lookup.py", "gate/immutable_map.py", "stores/redis/protocol.py", "stores/redis/local_cache.py"),
]


def documented(tree: ast.AST, found: Any) -> list[tuple[str, object, str]]:
    """Everything in a module or class that has a docstring: its name, itself, and the docstring."""
    pairs = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            one = getattr(found, node.name)
            text = ast.get_docstring(node)
            if text and not node.name.startswith("__"):  # Python has texts of its own for those of compiled classes
                pairs.append((node.name, one, text))
            if isinstance(node, ast.ClassDef):
                pairs += documented(node, one)
    return pairs


@pytest.mark.parametrize("name", COMPILED)
def test_every_docstring_is_there(name: str) -> None:
    module = importlib.import_module("headgate." + name.removesuffix(".py").replace("/", "."))
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    assert pydoc.getdoc(module) == ast.get_docstring(tree)
    pairs = documented(tree, module)
    assert pairs
    assert {what: pydoc.getdoc(one) for what, one, _ in pairs} == {what: text for what, _, text in pairs}


def test_help_shows_them() -> None:
    text = pydoc.plain(pydoc.render_doc(Limiter)) + pydoc.plain(pydoc.render_doc(TokenBucket))
    assert "Let a request of this cost pass and count it, or deny it and count nothing." in text
    assert "Up to `capacity` tokens, refilled steadily" in text
    assert "The tokens that come in within `per` seconds." in text
