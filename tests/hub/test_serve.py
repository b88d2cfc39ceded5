"""The program `headgate serve`: startup, output, signals, logs without secrets, and shared servers."""

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import headgate
from headgate._version import VERSION
from headgate.hub.app import Hub
from headgate.hub.storage.database import DatabaseError
from headgate.proto import envelope_pb2 as wire
from tests.support.admin import LIMITS, ping
from tests.support.agent_connections import read_close
from tests.support.files import replace_file
from tests.support.hub import VIEWER, agent_connection, hub_settings
from tests.support.hub_process import ADMIN, HubProcess, hub_process
from tests.support.ports import unused_port
from tests.support.valkey import DURABLE, PATIENCE, ValkeyServer, wait_for

pytestmark = pytest.mark.long

PACKAGES = str(Path(headgate.__file__).parents[1])
MADE = {"HEADGATE_ADMIN_TOKEN": None}
"""Without a token that is given, one is made."""


IN_TURN = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from headgate.cli import main

for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["serve", "--port", "0", *arguments])
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def startup_errors(*attempts: list[str], **environment: str) -> list[str]:
    """What the program says when it can't start with these options, one attempt after the other in one process."""
    command = [sys.executable, "-c", IN_TURN, json.dumps(attempts)]
    surroundings = {**os.environ, **environment}
    result = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=PATIENCE, check=True)
    told = []
    for line, options in zip(result.stdout.splitlines(), attempts, strict=True):
        code, out, err = json.loads(line)
        assert (code, out) == (1, ""), options
        assert "Traceback" not in err, err
        told.append(err.removesuffix("\n"))
    return told


# The beginning --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_admin_token_is_created_at_the_first_start_and_shown_once(tmp_path: Path) -> None:
    data = tmp_path / "below" / "data"
    with hub_process(data, environment=MADE) as hub:
        wait_for(lambda: len(hub.out) == 3, "the third line")
        assert hub.out[0] == f"headgate {VERSION} listens on http://{hub} (agents: ws://{hub}/ws)\n"
        shown = re.fullmatch(r"admin token, shown this once: (hga_[\w-]{43})\n", hub.out[1])
        assert shown
        token = shown[1]
        with hub.http(token) as admin, hub.http("") as anyone:
            assert admin.post("/api/admin/agents", json={"agent_id": "planner"}).status_code == 201
            health: dict[str, Any] = {"status": "ok", "store": "ok", "disk": "ok", "problems": []}
            health |= {"version": VERSION, "connections": 0}
            assert anyone.get("/api/health").json() == anyone.get("/health").json() == health
        assert hub.stop() == 0
        assert token not in "".join(hub.err)
    assert data.stat().st_mode & 0o777 == 0o700
    assert all(token.encode() not in path.read_bytes() for path in data.iterdir())
    with hub_process(data, environment=MADE) as hub:
        with hub.http(token) as admin:
            assert [one["agent_id"] for one in admin.get("/api/admin/agents").json()["agents"]] == ["planner"]
        assert hub.stop() == 0
        assert [line.split(":")[0] for line in hub.out[1:]] == ["dashboard"]
    file = tmp_path / "token"
    file.write_text("another-token-from-a-file\n")
    with hub_process(data, "--admin-token-file", str(file), environment=MADE) as hub:
        for given, status in ((token, 401), ("another-token-from-a-file", 200)):
            with hub.http(given) as admin:
                assert admin.get(LIMITS).status_code == status


async def test_a_failed_first_start_creates_no_admin_token(tmp_path: Path) -> None:
    async def start() -> str:
        async with Hub(hub_settings(admin_token="", data=tmp_path)) as hub:
            return hub.tokens.created

    def change(sql: str) -> None:
        with sqlite3.connect(tmp_path / "hub.db") as db:
            db.executescript(sql)
        db.close()

    async with Hub(hub_settings(data=tmp_path)):
        pass
    change("DROP TABLE sessions; CREATE TABLE sessions (other)")
    with pytest.raises(DatabaseError):
        await start()
    change("DROP TABLE sessions")
    assert (await start()).startswith("hga_")
    assert await start() == ""


@pytest.mark.long
def test_settings_come_from_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text(
        f'[limits]\nlight = "7/minute"\n'
        f'[hub]\nlog_format = "json"\nregistration = "closed"\nviewer_token = "{VIEWER}"\n'
    )
    given = {"HEADGATE_CONFIG": str(file), "HEADGATE_REGISTRATION": "open", "HEADGATE_LOG_LEVEL": "debug"}
    with hub_process(tmp_path / "data", "--host", "localhost", environment=given) as hub, hub.http() as admin:
        assert admin.get(LIMITS).json()["defaults"]["ws"]["light"] == "7/minute"
        with hub.http("") as anyone:
            assert anyone.post("/api/onboard/register", json={"agent_id": "a"}).status_code == 201
        with hub.http(VIEWER) as viewer:
            assert viewer.get("/api/dashboard/state").status_code == 200
        assert hub.stop() == 0
        lines = [json.loads(line) for line in hub.err]
        assert [line["event"] for line in lines] == ["started", "stopping", "stopped"]
        assert lines[0]["store"] == "memory"


@pytest.mark.long
def test_invalid_settings_are_reported_and_nothing_is_started(tmp_path: Path) -> None:
    file, none, data, broken = (tmp_path / name for name in ("file", "none", "data", "broken"))
    file.write_text("no certificate, no database, no directory, no TOML\n")
    broken.mkdir()
    (broken / "hub.db").write_bytes(b"no database at all" * 100)
    policy = tmp_path / "headgate.toml"
    policy.write_text('[limits]\nhevy = "1/s"\nlight = 5\n')
    absurd, pipe = tmp_path / "absurd.toml", tmp_path / "pipe"
    absurd.write_text("[backoff]\nquiet = " + "9" * 5000)
    os.mkfifo(pipe)
    a_directory = "expected a directory that can be written, got:"
    in_pem = "expected a certificate and its key in PEM, got:"
    expected = {
        f"--data {file}": f"{file}: {a_directory} File exists",
        f"--data {file}/below": f"{file}/below: {a_directory} Not a directory",
        f"--data {broken}": f"{broken}/hub.db: expected an SQLite file that can be written, got: ",
        "--host nowhere.invalid": "nowhere.invalid port 0: expected an address to listen on, got: ",
        f"--tls-key {file}": "--tls-key: expected --tls-certificate too",
        f"--tls-certificate {file}": f"{file}: {in_pem} ",
        f"--tls-certificate {none}": f"{none}: {in_pem} No such file or directory",
        f"--tls-certificate {file} --tls-key {file}": f"{file} and {file}: {in_pem} ",
        f"--config {file}": f"{file}: 1 mistake\n  expected TOML, got: ",
        f"--config {none}": f"{none}: 1 mistake\n  expected a readable file, got: No such file or directory",
        f"--config {absurd}": f"{absurd}: 1 mistake\n  line 2: expected a number of 64 bits, got one",
        f"--config {pipe}": f"{pipe}: 1 mistake\n  expected a regular file, got a pipe or a device",
        f"--config {policy}": f"{policy}: 2 mistakes\n  limits.hevy: expected one of ",
        "--max-mail x --log-level loud": "settings of the hub: 2 mistakes\n  --max-mail: expected a whole number",
        f"--relay-rate-limit x --data {tmp_path}/a": "settings of the hub: 1 mistake\n  --relay-rate-limit: expected",
        f"--store redis://:a-password@h:99999 --data {tmp_path}/b": "store: expected a URL such as redis://",
    }
    attempts = [["--data", str(data), *options.split()] for options in expected]
    for told, start in zip(startup_errors(*attempts), expected.values(), strict=True):
        assert told.startswith(start)
        assert "a-password" not in told
    assert not data.exists()


@pytest.mark.long
def test_a_port_and_a_directory_belong_to_one_hub_at_a_time(tmp_path: Path) -> None:
    with unused_port() as port, hub_process(tmp_path, "--port", str(port)) as hub:
        assert hub.port == port
        other = str(tmp_path / "other")
        in_use, taken = startup_errors(["--port", str(hub.port), "--data", other], ["--data", str(tmp_path)])
        listening = f"127.0.0.1 port {hub.port}: expected an address to listen on, got: Address already in use"
        assert in_use == f"{listening}; choose another with --host or --port"
        assert taken == f"{tmp_path}: another hub uses this directory; give this one another by --data"
        assert not Path(other).exists()
        with hub.http() as admin:
            assert admin.get(LIMITS).status_code == 200
        hub.kill()
        with hub_process(tmp_path, "--port", str(port)) as again:  # neither is held by one that was killed
            assert again.port == port


SABOTAGE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("uvicorn", "msgspec"):
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_without_the_extra_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SABOTAGE)
    surroundings = {"PYTHONPATH": f"{tmp_path}:{PACKAGES}"}
    (told,) = startup_errors(["--data", str(tmp_path)], **surroundings)
    assert re.fullmatch(
        r"the hub needs more than the core: No module named '\w+'; in a checkout: pip install '\.\[server\]'", told
    )
    command = [sys.executable, "-m", "headgate", "policy", "show"]
    shown = subprocess.run(
        command, env={**os.environ, **surroundings}, capture_output=True, timeout=PATIENCE, check=False
    )
    assert (shown.returncode, shown.stderr) == (0, b"")


# While it runs --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_hub_gracefully(tmp_path: Path, number: int) -> None:
    with hub_process(tmp_path) as hub, hub.http() as admin:
        token = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]
        with (
            agent_connection(hub, "planner", token) as agent,
            socket.create_connection(("127.0.0.1", hub.port)) as idle,
        ):
            idle.send(b"GET /api/health HTTP/1.1\r\n")  # and never the rest
            os.kill(hub.pid, number)
            told = agent.hear()
            assert (told["type"], 1000 <= told["retry_after_ms"] <= 5000) == ("going_away", True)
            assert read_close(agent) == (1012, f"restarting; retry in {told['retry_after_ms']} ms")
        assert hub.end(0) == 0
        assert "Traceback" not in "".join(hub.err)


def test_sighup_reloads_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/minute"\n')
    with hub_process(tmp_path / "data", "--config", str(file)) as hub, hub.http() as admin:

        def light() -> Any:
            return admin.get(LIMITS).json()["defaults"]["ws"]["light"]

        def logged(text: str) -> bool:
            return any(text in line for line in hub.err)

        assert light() == "2/minute"
        os.kill(hub.pid, signal.SIGHUP)  # of a file that is the same
        wait_for(lambda: logged("by=SIGHUP"), "the reload")
        replace_file(file, "[limits")
        os.kill(hub.pid, signal.SIGHUP)
        wait_for(lambda: logged("policy not reloaded, the old one stays in effect"), "the refusal")
        assert light() == "2/minute"
        replace_file(file, '[limits]\nlight = "9/minute"\n')
        os.kill(hub.pid, signal.SIGHUP)
        wait_for(lambda: light() == "9/minute", "the new policy")
        assert hub.stop() == 0


def test_a_hub_without_a_policy_file_survives_sighup(tmp_path: Path) -> None:
    with hub_process(tmp_path) as hub, hub.http() as admin:
        os.kill(hub.pid, signal.SIGHUP)
        wait_for(lambda: any("SIGHUP ignored: without --config" in line for line in hub.err), "the log")
        assert admin.get(LIMITS).status_code == 200
        assert hub.stop() == 0


STARTING = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from headgate.hub import server
from headgate.hub.settings import HubSettings

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever has started this may ignore it, as nohup does

@contextmanager
def listen(settings):
    os.kill(os.getpid(), signal.SIGHUP)
    sys.exit(7)
    yield

server._listen = listen
server.serve(HubSettings.load({"data": Path(sys.argv[1])}), None, sys.stdout)
"""


def test_a_sighup_does_not_end_a_hub_that_starts(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", STARTING, str(tmp_path)], timeout=PATIENCE, check=False)
    assert done.returncode == 7


@pytest.mark.long
def test_a_policy_file_that_became_empty_is_applied_by_an_admin_alone(tmp_path: Path) -> None:
    file = tmp_path / "headgate.toml"
    file.write_text('[limits]\nlight = "2/minute"\n')
    with hub_process(tmp_path / "data", "--config", str(file)) as hub, hub.http() as admin:
        file.write_text("")
        wait_for(lambda: any("expected settings, got an empty file" in line for line in hub.err), "the log")
        assert admin.get(LIMITS).json()["defaults"]["ws"]["light"] == "2/minute"
        assert admin.post("/api/admin/reload").json()["reloaded"]
        assert admin.get(LIMITS).json()["defaults"]["ws"]["light"] == "120/minute"


@pytest.mark.long
def test_it_serves_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    own.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    own.private_key_pem.write_to_path(tmp_path / "key.pem")
    files = ("--tls-certificate", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with hub_process(tmp_path / "data", *files) as hub:
        assert hub.out[0] == f"headgate {VERSION} listens on https://{hub} (agents: wss://{hub}/ws)\n"
        headers = {"Authorization": f"Bearer {ADMIN}"}
        patient: dict[str, Any] = {"timeout": PATIENCE, "trust_env": False}
        with httpx.Client(base_url=f"https://{hub}", verify=trust, headers=headers, **patient) as admin:
            token = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]

        async def ping() -> list[str]:
            # websockets' client for threads reads and writes TLS at the same time, which OpenSSL doesn't allow.
            async with connect_async(f"wss://{hub}/ws", ssl=trust, proxy=None, open_timeout=PATIENCE) as agent:
                await agent.send(json.dumps({"type": "identify", "agent_id": "planner", "token": token}))
                await agent.send(json.dumps({"type": "ping"}))
                return [json.loads(await agent.recv())["type"] for _ in range(2)]

        assert asyncio.run(ping()) == ["identified", "pong"]
        with pytest.raises(httpx.ConnectError), httpx.Client(**patient) as stranger:
            stranger.get(f"https://{hub}/health")
        assert hub.stop() == 0


# What is never written down -------------------------------------------------------------------------------------------

MISTAKES = """
from headgate.hub.agents.registry import Registry

def wrong(method):
    async def work(self, *arguments, **options):
        if any("breaks" in str(argument) for argument in arguments):
            raise RuntimeError("on purpose")
        return await method(self, *arguments, **options)
    return work

for name in ("owner", "verify", "register", "rotate"):
    setattr(Registry, name, wrong(getattr(Registry, name)))
"""


def send_relay_hello(address: str, token: str) -> bytes:
    envelope = wire.Envelope(id="1", type=wire.MESSAGE_TYPE_HELLO, hello=wire.Hello(address=address, token=token))
    return envelope.SerializeToString()


def use_everywhere(hub: HubProcess, agent: str, token: str) -> None:
    """Show a token in every place where one can be shown, in good requests, bad ones, and some that are cut off."""
    headers = {"Authorization": f"Bearer {token}"}
    plain: dict[str, Any] = {"verify": False, "trust_env": False, "timeout": PATIENCE}  # certificates take time to read
    with httpx.Client(base_url=f"http://{hub}", headers=headers, **plain) as client:
        client.get("/api/tasks")
        client.get("/api/admin/changes")
        client.get(f"/api/nowhere/{token}?token={token}")
        client.post("/api/onboard/register", json={"agent_id": f"{agent} too", "invitation": token})
        client.post("/api/onboard/register", content=token)
        client.post("/api/admin/rate-limits/defaults", json={token: token})
    for first in (
        json.dumps({"type": "identify", "agent_id": agent, "token": token}),
        json.dumps({"type": "identify", "agent_id": agent, "token": [token]}),
        token,
    ):
        with connect(f"ws://{hub}/ws", additional_headers=headers, proxy=None, open_timeout=PATIENCE) as connection:
            connection.send(first)
            with suppress(ConnectionClosed):
                connection.recv(PATIENCE)
    for envelope in (send_relay_hello(agent, token), send_relay_hello(agent, token)[:-1], token.encode()):
        with connect(f"ws://{hub}/relay", proxy=None, open_timeout=PATIENCE) as connection:
            connection.send(envelope)
            with suppress(ConnectionClosed):
                connection.recv(PATIENCE)
    for request in (
        f"POST /api/tasks HTTP/1.1\r\nHost: ::1\r\nAuthorization: Bearer {token}\r\nContent-Length: 999\r\n\r\n{{",
        f"GET /api/tasks HTTP/1.1\r\nAuthorization: Bearer {token}",
        f"GET /api/{token} HTTP/9.9\r\nAuthorization: {token}\r\n\r\n",
        f"{token}\r\n\r\n",
        f"GET /ws HTTP/1.1\r\nHost: ::1\r\nUpgrade: websocket\r\nAuthorization: {token}\r\nConnection: upgrade\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", hub.port)) as raw:
            raw.send(request.encode())


@pytest.mark.long
@pytest.mark.parametrize("form", ["text", "json"])
def test_no_token_is_ever_in_the_log(tmp_path: Path, form: str) -> None:
    """With all that can be logged, and with mistakes of the hub's own, whose tracebacks are logged."""
    (tmp_path / "sitecustomize.py").write_text(MISTAKES)
    file = tmp_path / "headgate.toml"
    many = "100000/minute"
    file.write_text(f'[addresses]\nlimit = "{many}"\nregistration = "{many}"\nauthentication = "{many}"\n')
    surroundings = {"PYTHONPATH": f"{tmp_path}:{PACKAGES}", "HEADGATE_VIEWER_TOKEN": VIEWER, **MADE}
    options = ("--config", str(file), "--log-level", "debug", "--log-format", form, "--registration", "invitation")
    with hub_process(tmp_path / "data", *options, environment=surroundings) as hub:
        wait_for(lambda: len(hub.out) == 3, "the admin's token")
        secrets = {"admin": hub.out[1].split()[-1], "viewer": VIEWER, "nobody": "hg_nobodys-token-at-all"}
        secrets["link"] = hub.out[2].strip().partition("#token=")[2]
        with hub.http(secrets["admin"]) as admin:
            invitation = admin.post("/api/admin/invitations").json()["invitation"]
            used = admin.post("/api/admin/invitations").json()["invitation"]
            first = admin.post("/api/admin/agents", json={"agent_id": "planner"}).json()["token"]
            second = admin.post("/api/admin/agents/planner/token").json()["token"]
        with hub.http(second) as client:
            third = client.post("/api/onboard/rotate").json()["token"]
        with hub.http("") as client:
            body = {"agent_id": "invited", "invitation": used}
            fourth = client.post("/api/onboard/register", json=body).json()["token"]
        secrets |= {"invitation": invitation, "used": used, "first": first, "second": second, "third": third}
        secrets |= {"fourth": fourth, "breaking": "hg_a-token-that-breaks-the-hub"}
        for token in secrets.values():
            use_everywhere(hub, "planner", token)
            use_everywhere(hub, "breaks", token)
        with agent_connection(hub, "invited", fourth) as agent:
            assert agent.ask("ping") == {"type": "pong"}
        with hub.http("") as anyone:
            assert anyone.get("/health").json()["status"] == "ok"
        assert hub.stop() == 0
        log = "".join(hub.err)
        assert hub.out[3:] == []
    assert "agent connected" in log
    assert log.count("on purpose") >= 3 * len(secrets)
    assert log.count("Traceback" if form == "text" else '"frames"') >= 3 * len(secrets)
    for whose, secret in secrets.items():
        assert secret not in log, f"the token of {whose} is in the log"


# Several hubs over one server -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server of their own: it is killed."""
    with ValkeyServer(*DURABLE) as server:
        yield server


@pytest.fixture(scope="module")
def hubs(server: ValkeyServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubProcess, HubProcess]]:
    folder = tmp_path_factory.mktemp("hubs")
    file = folder / "headgate.toml"
    file.write_text(
        f'[limits]\nlight = "4/hour"\n[addresses]\nlimit = "100000/minute"\n[store]\ntimeout = {PATIENCE}\n'
    )
    options = ("--store", server.url, "--config", str(file))
    with hub_process(folder / "a", *options) as one, hub_process(folder / "b", *options) as other:
        yield one, other


@pytest.mark.long
def test_hubs_over_one_server_share_agents_limits_and_violations(hubs: tuple[HubProcess, HubProcess]) -> None:
    one, other = hubs
    with one.http() as here, other.http() as there:
        token = here.post("/api/admin/agents", json={"agent_id": "shared"}).json()["token"]
        assert there.post("/api/admin/agents", json={"agent_id": "shared"}).status_code == 409
        assert [agent["agent_id"] for agent in there.get("/api/admin/agents").json()["agents"]] == ["shared"]
        with agent_connection(one, "shared", token) as left, agent_connection(other, "shared", token) as right:
            said = [kind for agent in (left, right, left, right, left, right) for kind in ping(agent)]
            assert said == ["pong"] * 4 + ["rate_limited"] * 2
            for admin in (here, there):
                card = admin.get("/api/admin/agents/shared").json()
                assert (card["violations"], card["rate_limited"]) == (2, True)
            assert there.delete("/api/admin/violations/shared").json()["reset"] is True
            assert here.get("/api/admin/agents/shared").json()["violations"] == 0

            there.put(f"{LIMITS}/shared", json={"ws": {"light": "1/hour"}})
            wait_for(lambda: here.get(LIMITS).json()["overrides"], "the override")
            assert ping(left) + ping(right) == ["pong", "rate_limited"]
            here.delete(f"{LIMITS}/shared")
            wait_for(lambda: not there.get(LIMITS).json()["overrides"], "the end of the override")

            here.post(f"{LIMITS}/whitelist", json={"agent_id": "shared"})
            wait_for(lambda: there.get(f"{LIMITS}/whitelist").json()["agents"], "the exemption")
            assert ping(left, 5) + ping(right, 5) == ["pong"] * 10
            there.put(f"{LIMITS}/whitelist", json={"agents": []})
            there.put(f"{LIMITS}/defaults", json={"heavy": "3/minute"})
            wait_for(lambda: here.get(LIMITS).json()["defaults"]["http"]["heavy"] == "3/minute", "the default")
            changes = [admin.get("/api/admin/changes").json()["changes"] for admin in (here, there)]
            assert changes[0] == changes[1]
            assert len(changes[0]) == 5
            check = {"key": "k", "limit": 2}
            counts = [admin.post("/v1/check", json=check).json()["current_count"] for admin in (here, there, here)]
            assert counts == [1, 2, 2]

            assert there.delete("/api/admin/agents/shared/token").json()["revoked"] is True
            for agent in (left, right):
                assert read_close(agent)[0] == 1008
        with one.http(token) as client:
            assert client.get("/api/tasks").status_code == 401


@pytest.mark.long
def test_a_hub_keeps_working_during_an_outage(hubs: tuple[HubProcess, HubProcess], server: ValkeyServer) -> None:
    one, other = hubs
    with one.http() as admin:
        token = admin.post("/api/admin/agents", json={"agent_id": "patient"}).json()["token"]

        def health() -> tuple[str, str]:
            found = admin.get("/api/health").json()
            return found["status"], found["store"]

        assert health() == ("ok", "ok")
        with agent_connection(one, "patient", token) as agent:
            assert ping(agent) == ["pong"]
            server.kill()
            agent.say("ping")
            wait_for(lambda: health() == ("degraded", "away"), "the outage")
            assert agent.hear()["type"] in ("pong", "rate_limit_warning")
            assert ping(agent, 6).count("rate_limited") >= 2  # judged by the hub itself
            register = admin.post("/api/admin/agents", json={"agent_id": "too early"})
            assert (register.status_code, register.json()["error"]) == (503, "unavailable")
            override = admin.put(f"{LIMITS}/patient", json={"light": "9/hour"})
            assert (override.status_code, override.headers["Retry-After"]) == (503, "5")
            server.start()
            wait_for(lambda: health() == ("ok", "ok"), "the server's return")
            wait_for(lambda: admin.put(f"{LIMITS}/patient", json={"light": "9/hour"}).status_code == 200, "changes")
            wait_for(lambda: ping(agent) == ["pong"], "the override")
        assert admin.get("/api/metrics").json()["store_outages"] >= 1
    with other.http() as admin:
        wait_for(lambda: health() == ("ok", "ok"), "the other hub")


@pytest.mark.long
def test_a_hub_starts_during_an_outage(tmp_path: Path) -> None:
    with (
        unused_port() as port,
        hub_process(tmp_path, "--store", f"redis://:a-password@127.0.0.1:{port}") as hub,
        hub.http() as admin,
    ):
        wait_for(lambda: admin.get("/api/health").json()["status"] == "degraded", "the outage")
        assert admin.get("/ready").status_code == 200
        assert hub.stop() == 0
        log = "".join(hub.err)
        assert "starting without the server" in log
        assert "a-password" not in log
