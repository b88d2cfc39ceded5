"""A real uvicorn server for the applications of tests, in a thread of its own."""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import uvicorn
import uvloop

from tests.support.valkey import PATIENCE, wait_for

T = TypeVar("T")


class ThreadedServer:
    """A server that runs in a thread, in which there are no signals. As text it is its host and port."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="uvicorn")
        self._thread.start()
        wait_for(lambda: self._failure or (self.server is not None and self.server.started), "the server")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        assert self.server is not None
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.loop = runner.get_loop()
                runner.run(self.serve())
        except BaseException as failure:  # noqa: BLE001 - raised in the test
            self._failure = failure

    async def serve(self) -> None:
        """Set `server`, and let it serve to its end."""
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the server's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the server's loop, and wait for it."""

        async def work() -> T:
            return function(*arguments)

        return self.run(work())

    def connect(self) -> socket.socket:
        """A plain connection to it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def stop(self) -> None:
        """End it as a signal would."""
        if self.server is not None:
            self.server.should_exit = True
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server didn't end"
        if self._failure is not None:
            raise self._failure

    def __str__(self) -> str:
        return f"127.0.0.1:{self.port}"


class ServerWithoutSignals(uvicorn.Server):
    """In a thread there are no signals."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def main_loop(self) -> None:
        """Look more often than ten times a second whether to end, since tests start and end many."""
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.005)


class AppServer(ThreadedServer):
    """An application that is served."""

    def __init__(self, app: Callable[..., Any], **options: Any) -> None:
        settings: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": 0,
            "ws": "websockets-sansio",
            "interface": "asgi3",
            "lifespan": "off",
            "log_config": None,
            "timeout_graceful_shutdown": round(PATIENCE),
            "timeout_keep_alive": round(PATIENCE),
            "ws_ping_interval": None,
        }
        self._config = uvicorn.Config(app, **{**settings, **options})
        super().__init__()

    async def serve(self) -> None:
        self.server = ServerWithoutSignals(self._config)
        await self.server.serve()


@contextmanager
def app_server(app: Callable[..., Any], **options: Any) -> Iterator[AppServer]:
    """Serve an ASGI application until the block ends. The options are those of `uvicorn.Config`."""
    server = AppServer(app, **options)
    try:
        yield server
    finally:
        server.stop()
