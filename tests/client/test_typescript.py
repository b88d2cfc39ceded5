"""The relay's client in TypeScript: its own tests, run by Node against real hubs, which are provided here.

`npm test` gets the address of a small HTTP server in HEADGATE_TESTS. Its tests ask that server, in JSON, for what Node
can't do: a hub whose clock they advance, the real program to freeze, kill and start again, and an agent that receives
in Python.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from headgate import Policy
from headgate._version import VERSION
from headgate.proto import envelope_pb2 as wire
from tests.support.hub import HubServer, hub_server
from tests.support.hub_process import HubProcess, hub_process
from tests.support.valkey import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "clients/typescript"
LONGEST = 900.0
"""Seconds."""
LEAST = 281
"""So many tests there are at least: fewer would mean that some were not found."""


@contextmanager
def received_messages(url: str, name: str, token: str) -> Iterator[list[str]]:
    """What an agent that listens in Python has got, until the block ends."""
    bodies: list[str] = []
    with connect(url, proxy=None, compression=None, open_timeout=PATIENCE) as socket:

        def hear() -> wire.Envelope:
            frame = socket.recv()
            assert isinstance(frame, bytes)
            return wire.Envelope.FromString(frame)

        def listen() -> None:
            with suppress(ConnectionClosed):
                while True:
                    bodies.append(hear().data.body.decode())

        hello = wire.Hello(address=name, token=token)
        socket.send(wire.Envelope(id="hello", type=wire.MESSAGE_TYPE_HELLO, hello=hello).SerializeToString())
        assert hear().type == wire.MESSAGE_TYPE_WELCOME
        thread = threading.Thread(target=listen)
        thread.start()
        yield bodies
    thread.join(PATIENCE)


class HubServices:
    """What the tests in Node can ask for: each public method is a request, its result the answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._manual_hubs: list[HubServer] = []
        self._programs: list[tuple[HubProcess, dict[str, str | None]]] = []
        self._received: list[list[str]] = []
        self._stack = ExitStack()

    def manual(self, **settings: Any) -> dict[str, Any]:
        """A hub on a clock that is advanced by hand."""
        self._manual_hubs.append(self._stack.enter_context(hub_server(**settings)))
        return {"hub": len(self._manual_hubs) - 1, "url": f"ws://{self._manual_hubs[-1]}/relay"}

    def accounts(self) -> dict[str, Any]:
        """A hub on such a clock, with an account that has 10 dollars, and an agent of it that has 2 slots."""
        accounts = {"default": {"agent": {"slots": "2 in flight"}}, "at": {"acme": {"usd": "10 in all"}}}
        limits = {"light": "100000/minute", "normal": "100000/minute"}
        found = self.manual(policy=Policy(limits=limits, accounts=accounts, agents={"planner": {"account": "acme"}}))
        return {**found, "url": f"http://{self._manual_hubs[-1]}", "token": self.register(found["hub"], "planner")}

    def left(self, hub: int) -> str:
        """The dollars and the slots that are left."""
        gate = self._manual_hubs[hub].hub.gate
        usd, slots = [gate.account(path).limits[0].left for path in ("acme", "acme/-/planner")]
        return f"{usd:.2f} {slots}"

    def register(self, hub: int, agent: str) -> str:
        return self._manual_hubs[hub].register(agent)

    def advance(self, hub: int, ms: int) -> None:
        self._manual_hubs[hub].clock.advance(ms / 1000)

    def counted(self, hub: int) -> dict[str, int]:
        relay = self._manual_hubs[hub].hub.relay
        return {"passed": relay.passed, "denied": relay.denied, "connections": relay.connections}

    def revoke(self, hub: int, agent: str) -> None:
        self._manual_hubs[hub].run(self._manual_hubs[hub].hub.registry.revoke(agent))

    def program(self, rate: str, burst: str, agents: list[str]) -> dict[str, Any]:
        """The real program, on the real clock, and tokens of agents."""
        number = len(self._programs)
        environment: dict[str, str | None] = {"HEADGATE_RELAY_RATE_LIMIT": rate, "HEADGATE_RELAY_RATE_BURST": burst}
        hub = HubProcess(self._folder / str(number), environment=environment)
        self._programs.append((hub, environment))
        with hub.http("") as client:
            answers = [client.post("/api/onboard/register", json={"agent_id": agent}) for agent in agents]
        return {"hub": number, "url": f"ws://{hub}/relay", "tokens": [answer.json()["token"] for answer in answers]}

    def freeze(self, hub: int) -> None:
        os.kill(self._programs[hub][0].pid, signal.SIGSTOP)

    def kill(self, hub: int) -> None:
        self._programs[hub][0].kill()

    def stop(self, hub: int) -> None:
        self._programs[hub][0].stop()

    def start(self, hub: int) -> None:
        """One that was ended, on the same port and with the same data."""
        before, environment = self._programs[hub]
        again = HubProcess(self._folder / str(hub), "--port", str(before.port), environment=environment)
        self._programs[hub] = (again, environment)

    def server(self, module: str) -> int:
        """The port of a server of tests/support, which is a program of its own."""
        command = [sys.executable, "-m", f"tests.support.{module}"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        assert process.stdout is not None
        return int(process.stdout.readline())

    def receive(self, url: str, agent: str, token: str) -> int:
        self._received.append(self._stack.enter_context(received_messages(url, agent, token)))
        return len(self._received) - 1

    def received(self, receiver: int, count: int) -> list[str]:
        """What a receiver has got, when it is so much."""
        bodies = self._received[receiver]
        wait_for(lambda: len(bodies) >= count, f"{count} messages")
        return bodies

    def close(self) -> None:
        for hub, _ in self._programs:
            hub.kill()
        self._stack.close()


class ServiceHandler(BaseHTTPRequestHandler):
    """Handles the requests, one at a time, since they come from one test after the other."""

    services: HubServices

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            status, answer = 200, getattr(self.services, request.pop("do"))(**request)
        except Exception as error:  # noqa: BLE001 - the test in Node shows it
            status, answer = 500, repr(error)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a small HTTP server, until the block ends."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(PATIENCE)


@contextmanager
def hub_services(folder: Path) -> Iterator[str]:
    """The address of the services, until the block ends."""
    services = HubServices(folder)
    try:
        with http_server(type("Handler", (ServiceHandler,), {"services": services})) as address:
            yield address
    finally:
        services.close()


def npm(*arguments: str, **variables: str) -> str:
    """What npm says, if it succeeds."""
    command = shutil.which("npm")
    assert command is not None, "the client in TypeScript needs npm (apt install npm)"
    with subprocess.Popen(
        [command, *arguments],
        cwd=CLIENT,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # npm alone would leave behind what it has started
            raise
    assert process.returncode == 0, f"npm {' '.join(arguments)}:\n{said}"
    return said


@pytest.fixture(scope="module")
def built_package() -> None:
    """The package with what it needs, compiled."""
    npm("install", "--no-audit", "--no-fund", "--prefer-offline")
    npm("run", "build")


@pytest.mark.long
@pytest.mark.usefixtures("built_package")
def test_d5_typescript_the_client_passes_its_tests_against_real_hubs(tmp_path: Path) -> None:
    with hub_services(tmp_path) as address:
        said = npm("test", HEADGATE_TESTS=address)
    counted = dict(re.findall(r"^\S+ (tests|pass|skipped) (\d+)$", said, re.MULTILINE))
    assert int(counted["tests"]) == int(counted["pass"]) >= LEAST, said
    assert counted["skipped"] == "0", said


class PageHandler(SimpleHTTPRequestHandler):
    """An empty page that finds the package, which is served as it stands."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, directory=str(CLIENT))

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        protobuf = "/node_modules/@bufbuild/protobuf/dist/esm"
        imports = {
            "@headgate/relay": "/dist/index.js",
            "@bufbuild/protobuf": f"{protobuf}/index.js",
            "@bufbuild/protobuf/codegenv2": f"{protobuf}/codegenv2/index.js",
        }
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f'<script type="importmap">{json.dumps({"imports": imports})}</script>'.encode())

    def log_message(self, *_: object) -> None:
        pass


IN_A_BROWSER = """
async ([url, token]) => {
    const { RelayClient } = await import("@headgate/relay");
    const denials = [], bodies = [];
    const onRateLimited = (denial) => denials.push(denial);
    const client = new RelayClient(url, { address: "self", token, onRateLimited, inbox: 500 });
    let sent = 0;
    while (sent < 15 || (denials.length === 0 && sent < 400)) { // a slow machine keeps to the limit by itself
        await Promise.all(Array.from({ length: 15 }, () => client.send("self", String(sent++))));
    }
    for await (const { body } of client) {
        if (bodies.push(new TextDecoder().decode(body)) === sent) break;
    }
    const unsent = await client.close();
    const stranger = new RelayClient(url, { address: "self", token: "wrong" });
    return { sent, bodies, denials, unsent, refusal: await stranger.ready.catch((error) => error.code) };
}
"""


@pytest.mark.long
@pytest.mark.usefixtures("built_package")
def test_d5_typescript_the_client_works_in_a_browser_with_its_own_websocket(tmp_path: Path) -> None:
    chromium = shutil.which("chromium")
    assert chromium, "expected the program chromium on the path (apt install chromium); ./dev long installs it"
    environment = {"HEADGATE_RELAY_RATE_LIMIT": "20", "HEADGATE_RELAY_RATE_BURST": "1"}
    environment["HEADGATE_ALLOWED_HOSTS"] = "127.0.0.1"  # the page is another site, with another port
    with (
        hub_process(tmp_path, environment=environment) as hub,
        http_server(PageHandler) as site,
        sync_playwright() as playwright,
    ):
        with hub.http("") as agent:
            token = agent.post("/api/onboard/register", json={"agent_id": "self"}).json()["token"]
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE * 1000
        )
        page = browser.new_page()
        page.goto(site, timeout=PATIENCE * 1000)
        found = page.evaluate(IN_A_BROWSER, [f"ws://{hub}/relay", token])
        browser.close()
    assert found["bodies"] == [str(number) for number in range(found["sent"])]
    assert found["denials"]
    assert all(1 <= one["waitMs"] <= 50 and "20/second burst 1;" in one["reason"] for one in found["denials"])
    assert (found["unsent"], found["refusal"]) == ([], "unauthorized")


@pytest.mark.once
def test_the_package_says_the_version_of_headgate_and_of_all_it_needs() -> None:
    package = json.loads((CLIENT / "package.json").read_text())
    assert package["version"] == VERSION
    needed = {**package["dependencies"], **package["devDependencies"]}
    assert {name for name, version in needed.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)} == set()
