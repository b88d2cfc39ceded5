"""Servers of ASGI and WSGI applications, as programs of their own."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.http_callers import is_listening
from tests.support.ports import unused_port
from tests.support.valkey import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]

_COMMANDS = {
    "uvicorn": ["uvicorn", "--factory", "--log-level", "critical", "--host=127.0.0.1", "--port={port}"],
    "hypercorn": ["hypercorn", "--workers=0", "--log-level", "critical", "--bind=127.0.0.1:{port}"],
    "granian": ["granian", "--factory", "--interface=asgi", "--no-log", "--host=127.0.0.1", "--port={port}"],
    "gunicorn": ["gunicorn", "--timeout=0", "--no-control-socket", "--log-level=critical", "--bind=127.0.0.1:{port}"],
}


@contextmanager
def server_process(server: str, app: str, *options: str, **environment: str) -> Iterator[int]:
    """Serve the application that a function makes, given as "module:function", until the block ends; the port."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with unused_port() as port:
        command = [part.format(port=port) for part in _COMMANDS[server]]
        command = [sys.executable, "-m", *command, *options, app if "--factory" in command else f"{app}()"]
        with listening_process(port, command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path, **environment}):
            yield port


@contextmanager
def listening_process(port: int, command: list[str], **options: Any) -> Iterator[None]:
    """Run a server that listens at a port, with options of `Popen`, until the block ends."""
    process = subprocess.Popen(command, **options)
    try:
        wait_for(lambda: process.poll() is not None or is_listening(port), "the server")
        assert process.poll() is None, f"it has ended: {command}"
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)
