"""A server of a language model that streams words and reports its usage, in the format of OpenAI.

`python -m tests.support.language_model PORT` starts it. It fails for the prompt "fail", and hangs up in the middle of
its answer to "hang up".
"""

import json
import sys
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import make_server


def application(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
    body = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
    prompt = body["messages"][0]["content"]
    headers = [("content-type", "text/event-stream"), *([("content-length", "1000")] if prompt == "hang up" else [])]
    start_response("500 Oops" if prompt == "fail" else "200 OK", headers)
    for _ in range(2 if prompt == "hang up" else body["max_tokens"]):
        yield _event({"choices": [{"delta": {"content": "water "}}]})
    if prompt != "hang up":
        usage = {"prompt_tokens": 1000, "completion_tokens": body["max_tokens"]}
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


if __name__ == "__main__":
    make_server("127.0.0.1", int(sys.argv[1]), application).serve_forever()
