"""The types of headgate, as users of pyright see them. (mypy checks the whole tree, strictly, in ./dev test.)"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent


def left_to_subclasses(owner: ast.ClassDef) -> list[str]:
    """The methods of a class that do nothing but raise NotImplementedError."""
    return [
        f"{owner.name}.{node.name}"
        for node in owner.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) <= 2
        if ast.unparse(node.body[-1]) == "raise NotImplementedError"
    ]


def test_what_subclasses_must_have_is_abstract() -> None:
    """mypy then refuses a subclass that lacks it, and Python an instance of one."""
    found = []
    for path in sorted(Path(headgate.__file__).parent.rglob("*.py")):
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(owner, ast.ClassDef):
                found += left_to_subclasses(owner)
    assert found == []


@pytest.mark.long
def test_pyright_has_nothing_to_say_about_the_examples() -> None:
    """basedpyright is pyright with its own Node.js, so nothing is downloaded when it runs."""
    command = [sys.executable, "-m", "basedpyright", f"--pythonpath={sys.executable}", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["generalDiagnostics"] == []
    assert found["summary"]["filesAnalyzed"] == len([*(ROOT / "examples").rglob("*.py")])
