"""An application that counts in memory, for servers with several workers."""

import logging

from headgate.edges.asgi import App, RateLimitMiddleware
from tests.support.greeting_app import greeting_app


def make() -> App:
    logging.basicConfig(level=logging.WARNING)
    return RateLimitMiddleware(greeting_app, "1000/minute")
