"""`headgate bench`, `headgate completion`, the policy as JSON, and what is said where an extra isn't installed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headgate as package
from headgate import Policy, RedisStore
from headgate._version import VERSION
from headgate.limits import decision
from tests.support.cli import PACKAGES, Command, run_command
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, ValkeyServer

pytestmark = [pytest.mark.long, pytest.mark.once]

NO_REDIS = (
    r"expected redis-py for a store at a URL, got: No module named 'redis'; in a checkout: pip install '\.\[redis\]'"
)

BY_ONE = ["Limiter.check, allow", "Limiter.check, deny", "Gate.check, allow", "Gate.check, deny"]


def test_bench_measures_this_machine(headgate: Command) -> None:
    first, titles, *rows = headgate("bench", "--seconds", "0.01").expect_output().splitlines()
    assert first.startswith(f"headgate {VERSION} (")
    assert re.fullmatch(r"1000 keys in turn, memory +ns a check +best +checks a second", titles)
    assert [re.sub(r"( +[\d,]+){3}", "", row) for row in rows] == [*BY_ONE, "Limiter.check, allow, 8 threads together"]


def test_bench_measures_a_server_and_leaves_nothing_there_for_ever(
    redis_server: ValkeyServer, printed_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def patient(url: str, **options: Any) -> RedisStore:
        return RedisStore(url, **options | {"timeout": PATIENCE})

    monkeypatch.setattr("headgate.stores.redis.RedisStore", patient)
    told = printed_json("bench", "--seconds", "0.01", "--store", redis_server.url)
    assert (told["version"], told["store"], told["keys"]) == (VERSION, "server", 100)
    assert told["compiled"] is not decision.__file__.endswith(".py")
    assert told["python"].endswith(".".join(map(str, sys.version_info[:3])))
    assert [one["what"] for one in told["figures"]] == [*BY_ONE, "Limiter.acheck, allow, 1000 at once"]
    for one in told["figures"]:
        assert 0 < one["best_ns"] <= one["ns"]
        assert one["per_second"] == pytest.approx(1e9 / one["ns"], rel=0.01)
    with redis_server.client(decode_responses=True) as client:
        keys = list(client.scan_iter(match="headgate-bench-*"))
        assert keys
        left = [client.ttl(key) for key in keys]  # -2: it is gone by now, -1: it stays
        assert -1 not in left
        assert max(left) <= 600


def test_bench_without_a_server_says_so(headgate: Command) -> None:
    with unused_port() as port:
        err = headgate("bench", "--store", f"redis://127.0.0.1:{port}").expect_error()
    assert err.startswith("store: expected a Redis or Valkey server that answers, got Connection")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ov", ["override"]),
        ("override ", ["list", "set", "remove"]),
        ("override set --ch", ["--channel"]),
        ("check --tier ", ["light", "normal", "heavy"]),
        ("replay --tier ", ["light", "normal", "heavy"]),
        ("completion ", ["bash", "zsh", "tcsh", "fish"]),
        ("replay ex", ["example.toml"]),
        ("agents --tok", ["--token-file"]),
        ("policy check exam", ["example.toml"]),
    ],
)
def test_bash_completes(typed: str, offered: list[str], headgate: Command, tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(headgate("completion", "bash").expect_output())
    (tmp_path / "example.toml").touch()
    typing = f"""
source ./completion
COMP_LINE='headgate {typed}' COMP_WORDS=(headgate {typed}{"''" if typed.endswith(" ") else ""})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_shtab_headgate headgate "${{COMP_WORDS[COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", typing], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef headgate"), ("tcsh", "# AUTOMATICALLY GENERATED")])
def test_other_shells_have_a_script_too(shell: str, begins: str, headgate: Command) -> None:
    out = headgate("completion", shell).expect_output()
    assert out.startswith(begins)
    assert all(word in out for word in ("override", "violations", "bench"))
    assert "admin-token" not in out.replace("admin-token-file", "")


def test_a_policy_can_be_read_as_json(tmp_path: Path, headgate: Command, printed_json: Callable[..., Any]) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nws.heavy = "5/minute"\n[agents."a b"]\nws.light = "1/s"\n')
    changes = [
        {"path": "limits.ws.heavy", "value": '"5/minute"', "default": '"10/minute"'},
        {"path": 'agents."a b".ws.light', "value": '"1/second"', "default": ""},
    ]
    assert printed_json("policy", "check", str(file)) == {"file": str(file), "changes": changes}
    assert Policy(**printed_json("policy", "show", str(file))) == Policy.load(file)
    file.write_text("[")
    headgate("policy", "check", str(file), "--json").expect_error()


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """headgate, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    shutil.copytree(Path(package.__file__).parent, folder / "headgate", ignore=shutil.ignore_patterns("__pycache__"))
    for library in PACKAGES.glob("*__mypyc.*.so"):
        shutil.copy(library, folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["top"], 1, r"top needs more than the core: No module named '\w+'; in a checkout: pip install '\.\[cli\]'"),
        (["policy", "show", "--effective", "--hub", "http://127.0.0.1:1"], 1,
         r"http://127\.0\.0\.1:1: expected a hub that answers, .*"),
        (["completion", "bash"], 1,
         r"completion needs more than the core: No module named 'shtab'; in a checkout: pip install '\.\[cli\]'"),
        (["bench", "--store", "redis://localhost"], 1,
         f"--store: {NO_REDIS}"),
        (["check", "a", "--tier", "light", "--store", "redis://localhost"], 3,
         f"headgate check: undecided: --store: {NO_REDIS}"),
        (["serve"], 1,
         r"the hub needs more than the core: No module named '\w+'; in a checkout: pip install '\.\[server\]'"),
        (["agents", "--hub", "http://127.0.0.1:1"], 1, r"http://127\.0\.0\.1:1: expected a hub that answers, .*"),
    ],
)  # fmt: skip
def test_without_the_extra_it_says_what_to_install(bare: Path, arguments: list[str], code: int, text: str) -> None:
    program = f"import sys; sys.path.insert(0, {str(bare)!r}); from headgate.cli import main; sys.exit(main())"
    command = [sys.executable, "-I", "-S", "-c", program]
    result = run_command(*arguments, command=command, more={"HEADGATE_ADMIN_TOKEN": "a-token-of-the-tests"})
    assert (result.returncode, result.stdout) == (code, "")
    assert re.fullmatch(text, result.stderr.strip())
