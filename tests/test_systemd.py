"""The unit for systemd. Its commands are run as they stand, with other paths; systemd itself judges the rest."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.support.hub_process import ADMIN
from tests.support.valkey import PATIENCE, wait_for

pytestmark = pytest.mark.once

UNIT = Path(__file__).parents[1] / "docs" / "headgate.service"
PROGRAM = "/opt/headgate/bin/headgate"
REFUSE_EXECUTABLE_MEMORY = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(65, 1, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""As MemoryDenyWriteExecute=yes does, by PR_SET_MDWE of Linux 6.3; an older Linux ignores it."""


def service() -> dict[str, str]:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT.read_text(encoding="utf-8").replace("\\\n", ""))
    return dict(unit["Service"])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd isn't installed (apt install systemd)")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    unit.write_text(text.replace(PROGRAM, "/bin/true"))  # it has to exist
    verify = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")  # some mistakes are warnings alone
    judge = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)]  # of 100
    judged = subprocess.run(judge, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout


def test_the_unit_is_hardened() -> None:
    found = service()
    wanted = {"DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "StateDirectory": "headgate"}
    assert wanted.items() <= found.items()
    assert (found["Restart"], found["LimitNOFILE"]) == ("on-failure", "16384")


def test_its_commands_start_reload_and_stop_a_hub(tmp_path: Path) -> None:
    config, token = tmp_path / "headgate.toml", tmp_path / "admin-token"
    config.write_text('[hub]\nport = 0\nlog_format = "json"\n[limits]\nlight = "100/minute"\n')
    token.write_text(f"{ADMIN}\n")
    found = service()
    (credential,) = found["LoadCredential"].split(",")
    assert credential == "admin-token:/etc/headgate/admin-token"
    start = found["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).replace(PROGRAM, "-m headgate")
    for name, path in {"/etc/headgate": tmp_path, "/var/lib/headgate": tmp_path / "data"}.items():
        start = start.replace(name, str(path))
    command = [sys.executable, "-c", REFUSE_EXECUTABLE_MEMORY, sys.executable, *shlex.split(start)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")}
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True) as hub,
    ):
        try:
            assert hub.stdout is not None
            assert re.match(r"headgate \S+ listens on http://127\.0\.0\.1:", hub.stdout.readline())
            assert (tmp_path / "data" / "hub.db").exists()
            config.write_text('[limits]\nlight = "fast"\n')
            assert shlex.split(found["ExecReload"])[1:] == ["-HUP", "$MAINPID"]
            hub.send_signal(signal.SIGHUP)
            wait_for(lambda: any("light" in line for line in events(log)), "the mistake in the log")
            hub.terminate()
            assert "hga_" not in hub.stdout.read()  # the token of the file is in use: none was generated
            assert hub.wait(PATIENCE) == 0
        finally:
            hub.kill()


def events(log: Path) -> list[str]:
    """The whole lines of a log."""
    return [json.dumps(json.loads(line)) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
