"""Roles: a gate keeps them for the application, as it keeps every change."""

from pathlib import Path
from typing import Any

import pytest

from headgate import Gate, InvalidInput, Policy
from headgate.gate.changes import role
from tests.support.verbs import Verbs


def test_b6_a_role_is_given_and_taken_away(tmp_path: Path, verb: Verbs) -> None:
    with Gate(remember=tmp_path / "headgate.db") as gate:
        verb(gate, "set_role")("ada", "admin", by="root")
        gate.change([role("bob", "viewer"), role("eve", "admin")])
        verb(gate, "set_role")("eve", None)
        assert [gate.role_of(name) for name in ("ada", "bob", "eve", "anybody")] == ["admin", "viewer", "", ""]
    with Gate(remember=tmp_path / "headgate.db") as gate:
        gate.reload(Policy(warn_at=0.5))
        assert gate.effective.roles == {"ada": "admin", "bob": "viewer"}
        assert [(str(change), change.by) for change in gate.history()] == [
            ("role of 'ada' set to admin", "root"),
            ("role of 'bob' set to viewer, role of 'eve' set to admin", ""),
            ("role of 'eve' removed", ""),
        ]


def test_b6_a_role_changes_no_limit_and_drops_no_bucket(gate: Gate) -> None:
    gate.check("a", "ws", "heavy", cost=4)
    gate.set_role("a", "admin")
    assert gate.check("a", "ws", "heavy").remaining == 5


@pytest.mark.parametrize("given", ["", "x" * 65, "a\nb", 5])
def test_b6_a_bad_role_is_refused(given: Any) -> None:
    gate = Gate()
    with pytest.raises(InvalidInput, match="role: expected 1 to 64 printable characters, or None, got"):
        gate.set_role("a", given)
    with pytest.raises(InvalidInput, match="agent: expected 1 to 128 printable characters"):
        gate.set_role("", "admin")
    assert gate.history() == []
