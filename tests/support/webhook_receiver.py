"""A real receiver of webhooks on loopback, with prepared answers."""

import json
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class ReceivedWebhook:
    """One request."""

    def __init__(self, path: str, headers: Message, body: bytes) -> None:
        self.path, self.headers, self.body = path, headers, body

    def json(self) -> Any:
        return json.loads(self.body)


class WebhookReceiver:
    """Hears what is posted, and answers with the next of `answers`, or with 200.

    An answer is a status, with headers perhaps, or a function that does as it likes with the connection.
    """

    def __init__(self, port: int = 0) -> None:
        self.heard: list[ReceivedWebhook] = []
        self.answers: deque[int | tuple[int, dict[str, str]] | Callable[[socket.socket], object]] = deque()
        self.let_go = threading.Event()
        handler = type("Handler", (_Handler,), {"receiver": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", port), handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/alerts"

    @property
    def events(self) -> list[tuple[str, str]]:
        """What happened to whom, in the order of arrival."""
        return [(one.json()["event"], one.json()["alert"]["agent_id"]) for one in self.heard]

    def hang(self, _connection: socket.socket) -> None:
        """An answer that doesn't come."""
        self.let_go.wait()

    def close(self) -> None:
        self.let_go.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    receiver: WebhookReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = self.receiver.answers.popleft() if self.receiver.answers else 200
        self.receiver.heard.append(ReceivedWebhook(self.path, self.headers, body))
        self.close_connection = True
        with suppress(OSError):
            if callable(answer):
                answer(self.connection)
                return
            status, headers = answer if isinstance(answer, tuple) else (answer, {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None: ...
