"""Reloading a policy file: valid or not at all, and whatever happens to the file, the watcher goes on."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from headgate import Gate, InvalidInput, Policy, RedisStore
from headgate.errors import StoreAway
from headgate.events import Event, PolicyChanged
from headgate.gate import policy as policy_module
from headgate.gate.change_log import MemoryChangeLog
from headgate.gate.reload import PolicyWatcher, reload_file
from headgate.stores.base import LogPage
from headgate.stores.sqlite import ChangeLogError
from tests.support.files import replace_file
from tests.support.valkey import PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.once
Looks = Callable[[], None]


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
        write_limit(path, 88)
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


# Whatever happens, the watcher goes on --------------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """Waits until the watcher has looked at the file twice, from beginning to end."""
    begun = 0
    read = policy_module.read_file

    def count(path: str) -> bytes:
        nonlocal begun
        begun += 1
        return read(path)

    def wait() -> None:
        enough = begun + 4  # one has begun before, two are looks, and the last shows that the second is over
        wait_for(lambda: begun >= enough, "two looks at the file")

    monkeypatch.setattr("headgate.gate.reload.read_file", count)
    return wait


def write_limit(path: Path, heavy: int) -> None:
    replace_file(path, f'[limits]\nheavy = "{heavy}/minute"\n')


def heavy_limit(gate: Gate) -> int:
    return gate.capacity("a", "ws", "heavy")


class FailingLog(MemoryChangeLog):
    """A log that can't be read while there is an error."""

    error: Exception | None = None

    def read(self, after: int = 0) -> LogPage:
        if self.error is not None:
            raise self.error
        return super().read(after)


@pytest.mark.parametrize(
    "error", [StoreAway("away"), ChangeLogError("locked"), OSError(5, "I/O error"), RecursionError(), MemoryError()]
)
def test_a_reload_that_fails_is_logged_once_and_tried_until_it_succeeds(
    path: Path, looks: Looks, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    log = FailingLog()
    gate = Gate(Policy.load(path), remember=log)
    with PolicyWatcher(gate, path, interval=0.005):
        log.error = error
        write_limit(path, 7)
        looks()
        looks()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        log.error = StoreAway("another reason")
        looks()
        assert "another reason" in caplog.text
        assert heavy_limit(gate) == 5
        log.error = None
        wait_for(lambda: heavy_limit(gate) == 7, "the change, once it can be applied")
        log.error = error
        write_limit(path, 8)
        looks()
        assert len(caplog.records) == 3, "the same failure of another file is logged again"


def test_an_edit_while_the_server_is_away_is_applied_when_it_is_back(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        ValkeyServer() as server,
        RedisStore(server.url) as store,
        Gate(Policy.load(path), store=store) as gate,
        PolicyWatcher(gate, path, interval=0.01),
    ):
        server.kill()
        write_limit(path, 7)
        wait_for(lambda: "policy not reloaded, the old one stays in effect" in caplog.text, "the failure")
        server.start()
        wait_for(lambda: heavy_limit(gate) == 7, "the change")


def test_a_sighup_that_fails_is_tried_again(path: Path, looks: Looks) -> None:
    log, heard = FailingLog(), list[str]()
    gate = Gate(Policy.load(path), remember=log)
    gate.subscribe(lambda event: heard.append(str(event)), PolicyChanged)
    with PolicyWatcher(gate, path, interval=0.005, sighup=True):
        log.error = StoreAway("away")
        path.write_text("", encoding="utf-8")  # which only an explicit reload applies
        os.kill(os.getpid(), signal.SIGHUP)
        looks()
        log.error = None
        wait_for(lambda: heavy_limit(gate) == 10, "the defaults")
        looks()
    assert heard == [str(PolicyChanged("policy reloaded", "SIGHUP"))]


def test_a_sighup_that_fails_applies_no_later_half_of_a_file(path: Path, looks: Looks) -> None:
    """It asked for the file of then. Somebody who edits it meanwhile may have cut it off."""
    log = FailingLog()
    gate = Gate(Policy.load(path), remember=log)
    with PolicyWatcher(gate, path, interval=0.005, sighup=True):
        log.error = StoreAway("away")
        os.kill(os.getpid(), signal.SIGHUP)
        looks()
        path.write_text("", encoding="utf-8")
        log.error = None
        looks()
        assert heavy_limit(gate) == 5
        write_limit(path, 7)
        wait_for(lambda: heavy_limit(gate) == 7, "the edit")


DEEP = "[limits]\nheavy = " + "[" * 5000 + "]" * 5000
BROKEN = {
    "a value out of bounds": b"[backoff]\nquiet = 9999999999999\n",
    "nested too deeply": DEEP.encode(),
    "tables nested too deeply": b"agents" + b".a" * 5000 + b" = 1\n",
    "too many digits": b"warn_at = " + b"9" * 5000,
    "too many hexadecimal digits": b"[store]\nnodes = 0x" + b"f" * 5000,
    "no text": b"\xff\xfe\x00",
    "no TOML": b"[limits",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_cannot_be_used_is_logged_once_and_the_next_is_applied(
    path: Path, looks: Looks, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    gate = Gate(Policy.load(path))
    with PolicyWatcher(gate, path, interval=0.005):
        path.write_bytes(content)
        looks()
        looks()
        (record,) = caplog.records
        assert record.getMessage().startswith(
            f"policy not reloaded, the old one stays in effect: {path}: 1 mistake\n  "
        )
        assert heavy_limit(gate) == 5
        write_limit(path, 7)
        wait_for(lambda: heavy_limit(gate) == 7, "the repaired file")


def make_directory(path: Path) -> None:
    path.mkdir()


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(policy_module.MAX_FILE + 1)


def point_link(path: Path, target: Path) -> None:
    """Let a path lead to another file, in one step: the watcher may look at any moment."""
    link = path.with_suffix(".link")
    link.symlink_to(target)
    link.replace(path)


@pytest.mark.parametrize("replace", [lambda path: None, make_directory, make_loop, os.mkfifo, make_huge])
def test_a_file_that_cannot_be_read_is_logged_once_and_seen_when_it_can_be(
    path: Path, looks: Looks, caplog: pytest.LogCaptureFixture, replace: Callable[[Path], None]
) -> None:
    gate = Gate(Policy.load(path))
    readable, unreadable = path.rename(path.with_suffix(".readable")), path.with_suffix(".unreadable")
    replace(unreadable)
    point_link(path, readable)
    with PolicyWatcher(gate, path, interval=0.005):
        point_link(path, unreadable)
        looks()
        looks()
        assert len(caplog.records) == 1
        assert f"policy not reloaded, the old one stays in effect: {path}: 1 mistake" in caplog.text
        point_link(path, readable)
        looks()
        assert len(caplog.records) == 1, "it has the policy in effect"
        write_limit(path, 7)
        wait_for(lambda: heavy_limit(gate) == 7, "the new file")


def test_a_repaired_mode_is_seen(looks: Looks, caplog: pytest.LogCaptureFixture) -> None:
    nobody, user = 65534, os.geteuid()
    with TemporaryDirectory() as folder:  # root may read every file, and nobody can't enter tmp_path
        path = Path(folder) / "headgate.toml"
        write_limit(path, 5)
        gate = Gate(Policy.load(path))
        if user == 0:
            os.chown(folder, nobody, nobody)
            os.chown(path, nobody, nobody)
            os.seteuid(nobody)
        try:
            with PolicyWatcher(gate, path, interval=0.005):
                path.write_text('[limits]\nheavy = "7/minute"\n', encoding="utf-8")
                path.chmod(0)
                looks()
                assert "expected a readable file, got: Permission denied" in caplog.text
                path.chmod(0o600)
                wait_for(lambda: heavy_limit(gate) == 7, "the readable file")
        finally:
            os.seteuid(user)


# A file that is being written -----------------------------------------------------------------------------------------


def test_a_file_is_applied_once_it_has_stood_still(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes after each of the first twenty looks."""
    gate, heard, read, done = Gate(Policy.load(path)), list[str](), policy_module.read_file, list[int]()
    gate.subscribe(lambda event: heard.append(str(event)), PolicyChanged)

    def read_and_write(file: str) -> bytes:
        content = read(file)
        if len(done) < 20:
            done.append(1)
            write_limit(path, 10 + len(done))
        return content

    monkeypatch.setattr("headgate.gate.reload.read_file", read_and_write)
    with PolicyWatcher(gate, path, interval=0.005):
        wait_for(lambda: heavy_limit(gate) == 30, "the last content")
    assert len(heard) == 1


@pytest.mark.parametrize("content", ["", "\n# [limits]\n", "[limits]\n[limits.ws]\n"])
def test_a_file_that_became_empty_is_applied_only_explicitly(
    path: Path, looks: Looks, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    gate = Gate(Policy.load(path))
    gate.check("a", "ws", "heavy", cost=3)
    with PolicyWatcher(gate, path, interval=0.005, sighup=True):
        path.write_text(content, encoding="utf-8")
        looks()
        looks()
        assert gate.peek("a", "ws", "heavy").remaining == 2
        (record,) = caplog.records
        assert "expected settings, got an empty file; if it is meant to be empty, reload it" in record.getMessage()
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: heavy_limit(gate) == 10, "the defaults")


def test_an_empty_file_is_reloaded_explicitly(path: Path) -> None:
    gate = Gate(Policy.load(path))
    path.write_text("", encoding="utf-8")
    assert reload_file(gate, path)
    assert heavy_limit(gate) == 10


# Changes that neither size nor time show ------------------------------------------------------------------------------


def test_an_edit_before_the_watcher_is_seen(path: Path) -> None:
    gate = Gate(Policy.load(path))
    write_limit(path, 7)
    with PolicyWatcher(gate, path, interval=0.01):
        wait_for(lambda: heavy_limit(gate) == 7, "the edit")


def test_the_file_that_was_loaded_is_not_loaded_again(path: Path, looks: Looks) -> None:
    gate, heard = Gate(Policy.load(path)), list[Event]()
    gate.subscribe(heard.append, PolicyChanged)
    with PolicyWatcher(gate, path, interval=0.005):
        looks()
        path.touch()
        looks()
    assert heard == []


def test_a_rewrite_with_the_same_size_and_time_is_seen(path: Path) -> None:
    gate = Gate(Policy.load(path))
    found = path.stat()
    with PolicyWatcher(gate, path, interval=0.01):
        for number in (7, 8, 9):
            with path.open("r+") as file:
                file.write(f'[limits]\nheavy = "{number}/minute"\n')
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
            wait_for(lambda number=number: heavy_limit(gate) == number, "the rewrite")  # type: ignore[misc]
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (found.st_size, found.st_mtime_ns)


def test_a_link_that_is_swapped_is_followed(tmp_path: Path) -> None:
    """As Kubernetes updates a ConfigMap: the file is a link into a directory, which is a link that is replaced."""
    for number in (5, 7):
        (tmp_path / f"..{number}").mkdir()
        write_limit(tmp_path / f"..{number}" / "headgate.toml", number)
    (tmp_path / "..data").symlink_to("..5")
    path = tmp_path / "headgate.toml"
    path.symlink_to("..data/headgate.toml")
    gate = Gate(Policy.load(path))
    with PolicyWatcher(gate, path, interval=0.01):
        (tmp_path / "..tmp").symlink_to("..7")
        (tmp_path / "..tmp").replace(tmp_path / "..data")
        shutil.rmtree(tmp_path / "..5")
        wait_for(lambda: heavy_limit(gate) == 7, "the other directory")


# The watcher itself ---------------------------------------------------------------------------------------------------


def test_a_watcher_can_be_stopped_by_a_listener(path: Path) -> None:
    gate = Gate(Policy.load(path))
    watcher = PolicyWatcher(gate, path, interval=0.005)
    gate.subscribe(lambda _: watcher.stop(), PolicyChanged)
    write_limit(path, 7)
    watcher._thread.join(PATIENCE)
    assert not watcher._thread.is_alive()


@pytest.mark.parametrize("interval", [0, -1, float("nan"), 1e10, "1"])
def test_an_interval_that_no_thread_can_wait_for_is_refused(path: Path, interval: float) -> None:
    with pytest.raises(InvalidInput, match="PolicyWatcher interval: expected a number of seconds from "):
        PolicyWatcher(Gate(), path, interval=interval)


def test_without_sighup_the_file_is_watched_and_a_request_for_it_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    monkeypatch.delattr(signal, "SIGHUP")
    gate = Gate(Policy.load(path))
    with pytest.raises(InvalidInput, match="expected False, since this system has no SIGHUP"):
        PolicyWatcher(gate, path, sighup=True)
    with PolicyWatcher(gate, path, interval=0.01):
        write_limit(path, 7)
        wait_for(lambda: heavy_limit(gate) == 7, "the change")


FORK = """
import os, signal, sys, time
from headgate import Gate, Policy
from headgate.gate.reload import PolicyWatcher

path = sys.argv[1]
gate = Gate(Policy.load(path))
with PolicyWatcher(gate, path, interval=0.01):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # rather than hang for ever
        with open(path, "w") as file:
            file.write('[limits]\\nheavy = "7/minute"\\n')
        while gate.capacity("a", "ws", "heavy") != 7:
            time.sleep(0.01)
        os._exit(0)
    print(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_watches_too(path: Path) -> None:
    """As a worker of a server that loads the application before it forks."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE, check=True)
    assert done.stdout == "0\n"
