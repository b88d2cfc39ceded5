"""A server in place of a hub, with prepared answers."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ScriptedServer:
    """As text it is its host and port. `asked` has the requested paths."""

    def __init__(self, answer: Callable[[str], tuple[int, Mapping[str, str], bytes]], port: int) -> None:
        asked: list[str] = []

        class AnswerHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                status, headers, body = answer(self.path)
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.asked = asked
        self.server = ThreadingHTTPServer(("127.0.0.1", port), AnswerHandler)

    def __str__(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"


@contextmanager
def scripted_server(
    body: Any = None,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    before: Callable[[str], object] = lambda _: None,
    answers: Mapping[str, tuple[int, Any]] | None = None,
    port: int = 0,
) -> Iterator[ScriptedServer]:
    """A server that answers with a body, JSON unless it is bytes, until the block ends.

    `before` is called first. `answers` has the status and the body for some paths.
    """

    def answer(path: str) -> tuple[int, Mapping[str, str], bytes]:
        before(path)
        code, found = ({} if answers is None else answers).get(path, (status, body))
        return code, headers or {}, found if isinstance(found, bytes) else json.dumps(found).encode()

    one = ScriptedServer(answer, port)
    thread = threading.Thread(target=one.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield one
    finally:
        one.server.shutdown()
        one.server.server_close()
        thread.join()
