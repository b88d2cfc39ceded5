"""A real uvicorn server for the applications of tests, in a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import uvicorn
from servers import PATIENCE, wait_for

T = TypeVar("T")


class Serving:
    """A server that runs. As text it is its host and port: `f"ws://{server}/relay"`."""

    def __init__(self, app: Callable[..., Any], **options: Any) -> None:
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "ws": "headgate.hub.reading:PatientProtocol",
            "interface": "asgi3",
            "lifespan": "off",
            "log_config": None,
            "timeout_graceful_shutdown": 5,
        }
        self._server = uvicorn.Server(uvicorn.Config(app, **{**settings, **options}))
        self._thread = threading.Thread(target=self._run, name="uvicorn")
        self._thread.start()
        try:
            wait_for(lambda: self._server.started or not self._thread.is_alive(), "the server")
            if not self._server.started:
                raise RuntimeError("the server ended before it had started; what it raised is in the log")
            self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        except BaseException:
            self.stop()
            raise

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self._server.serve())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the server's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the server's loop, and wait for it."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def stop(self) -> None:
        """End it as a signal would."""
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server didn't end"

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def serving(app: Callable[..., Any], **options: Any) -> Iterator[Serving]:
    """Serve an ASGI application until the block ends. The options are those of `uvicorn.Config`."""
    server = Serving(app, **options)
    try:
        yield server
    finally:
        server.stop()
