"""The program `headgate serve`, as a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.valkey import PATIENCE, wait_for

ADMIN = "the-admin-token-of-the-tests"
LOOPBACK, ELSEWHERE = "127.0.0.1", "127.0.0.2"
"""The address of clients unless they say otherwise, and another on the same machine, with limits of its own."""
PLENTY = "1000000/second"
RAISED_ADDRESSES = f"""
[addresses]
limit = "{PLENTY}"
registration = "{PLENTY}"
connection = "{PLENTY}"
authentication = "{PLENTY}"
"""
"""Part of a policy file: addresses are not limited; agents have their usual limits."""
RAISED = f"""
[limits]
light = "{PLENTY}"
normal = "{PLENTY}"
heavy = "{PLENTY}"
{RAISED_ADDRESSES}"""
"""Part of a policy file: nothing is limited."""


class HubProcess:
    """A hub that was started by its command. As text it is its host and port."""

    def __init__(self, data: Path, *options: str, environment: Mapping[str, str | None] | None = None) -> None:
        command = [sys.executable, "-m", "headgate", "serve", "--port", "0", "--data", str(data), *options]
        surroundings = {**os.environ, "HEADGATE_ADMIN_TOKEN": ADMIN, **(environment or {})}
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in surroundings.items() if value is not None},
        )
        self.out: list[str] = []
        self.err: list[str] = []
        streams = ((self._process.stdout, self.out), (self._process.stderr, self.err))
        self._readers = [threading.Thread(target=_collect, args=stream) for stream in streams]
        for reader in self._readers:
            reader.start()
        try:
            wait_for(lambda: self.out or self._process.poll() is not None, "the hub's first line")
            found = re.search(r"https?://(\S+:(\d+))", "".join(self.out))
            assert found, "".join(self.out + self.err)
        except BaseException:
            self.kill()
            raise
        self.where, self.port = found[1], int(found[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def http(self, token: str = ADMIN, address: str = LOOPBACK) -> httpx.Client:
        """An HTTP client with a token, to be closed."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        once = httpx.Limits(max_keepalive_connections=0)  # an idle one may be closed just when it is to be used again
        where = f"http://{self}"
        transport = httpx.HTTPTransport(limits=once, trust_env=False, verify=False, local_address=address)
        return httpx.Client(base_url=where, headers=headers, transport=transport, timeout=PATIENCE, trust_env=False)

    def register(self, agent: str) -> str:
        """An agent's token."""
        with self.http() as http:
            answer = http.post("/api/admin/agents", json={"agent_id": agent}).raise_for_status()
        token: str = answer.json()["token"]
        return token

    def kill(self) -> None:
        """End it as a loss of power would."""
        self.end(signal.SIGKILL)

    def stop(self) -> int:
        """End it by SIGTERM, and return its exit code."""
        return self.end(signal.SIGTERM)

    def end(self, number: int) -> int:
        """End it by a signal, and return its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        code = self._process.wait(PATIENCE)
        for reader in self._readers:
            reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        return code

    def __str__(self) -> str:
        return self.where


def _collect(stream: Iterator[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)  # noqa: PERF402 - each as soon as it comes


@contextmanager
def hub_process(data: Path, *options: str, environment: Mapping[str, str | None] | None = None) -> Iterator[HubProcess]:
    """A hub, until the block ends, with these variables, or without those that are None."""
    hub = HubProcess(data, *options, environment=environment)
    try:
        yield hub
    finally:
        hub.stop()
