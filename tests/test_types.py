"""The types of headgate, as users of pyright see them. (mypy checks the whole tree, strictly, in ./dev test.)"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.valkey import PATIENCE

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent


@pytest.mark.long
def test_pyright_has_nothing_to_say_about_the_examples() -> None:
    """basedpyright is pyright with its own Node.js, so nothing is downloaded when it runs."""
    command = [sys.executable, "-m", "basedpyright", f"--pythonpath={sys.executable}", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["generalDiagnostics"] == []
    assert found["summary"]["filesAnalyzed"] == len([*(ROOT / "examples").rglob("*.py")])
