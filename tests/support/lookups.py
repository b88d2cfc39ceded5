"""Counts the lookups that gates build."""

from typing import Any

import pytest

import headgate.gate.gate_changes
from headgate.gate.lookup import Lookup


def count_lookups(monkeypatch: pytest.MonkeyPatch) -> list[Lookup]:
    """A list that every lookup is added to when it is built."""
    built: list[Lookup] = []

    def build(*arguments: Any) -> Lookup:
        built.append(Lookup(*arguments))
        return built[-1]

    monkeypatch.setattr(headgate.gate.gate_changes, "Lookup", build)
    return built
