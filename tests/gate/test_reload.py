"""Reloading a policy file: valid or not at all."""

import os
import signal
import threading
from pathlib import Path

import pytest

from headgate import Gate, Policy
from headgate.events import Event, PolicyChanged
from headgate.gate.reload import PolicyWatcher, reload_file
from tests.support.valkey import wait_for


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "headgate.toml"
    found.write_text('[limits]\nheavy = "5/minute"\n', encoding="utf-8")
    return found


def test_a_file_is_reloaded(path: Path) -> None:
    gate = Gate(Policy.load(path))
    events: list[Event] = []
    gate.subscribe(events.append)
    gate.check("a", "ws", "light", cost=20)
    path.write_text('[limits]\nheavy = "7/minute"\n', encoding="utf-8")
    assert reload_file(gate, path, by="ada")
    assert gate.capacity("a", "ws", "heavy") == 7
    assert gate.peek("a", "ws", "light").remaining == 100, "a limit that didn't change keeps its state"
    assert events[-1] == PolicyChanged("policy reloaded", "ada")


@pytest.mark.parametrize("broken", ['[limits]\nheavy = "x"\n', "[limits", None])
def test_a_broken_file_keeps_the_old_policy_and_drops_nothing(
    path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(Policy.load(path))
    gate.check("a", "ws", "heavy", cost=3)
    gate.record_violation("a")
    before = gate.policy
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken, encoding="utf-8")
    assert not reload_file(gate, path)
    assert gate.policy == before
    assert gate.peek("a", "ws", "heavy").remaining == 2
    assert gate.is_rate_limited("a")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"policy not reloaded, the old one stays in effect: {path}: 1 mistake\n  ")


def test_a_change_of_the_file_is_applied(path: Path) -> None:
    gate = Gate(Policy.load(path))
    with PolicyWatcher(gate, path, interval=0.01):
        path.write_text('[limits]\nheavy = "77/minute"\n', encoding="utf-8")
        wait_for(lambda: gate.capacity("a", "ws", "heavy") == 77, "the change")
        replacement = path.with_suffix(".new")
        replacement.write_text('[limits]\nheavy = "88/minute"\n', encoding="utf-8")
        replacement.replace(path)
        wait_for(lambda: gate.capacity("a", "ws", "heavy") == 88, "the replacement")
    path.write_text('[limits]\nheavy = "99/minute"\n', encoding="utf-8")
    assert threading.active_count() == 1 or all(t.name != "headgate-policy" for t in threading.enumerate())


def test_sighup_reloads(path: Path) -> None:
    gate = Gate(Policy())
    before = signal.getsignal(signal.SIGHUP)
    with PolicyWatcher(gate, path, interval=1000, sighup=True):
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: gate.capacity("a", "ws", "heavy") == 5, "the policy of the file")
    assert signal.getsignal(signal.SIGHUP) == before
