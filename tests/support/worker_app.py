"""An application that counts in memory, for servers with several workers."""

import logging

from headgate.edges.asgi import App, RateLimitMiddleware
from tests.support.greeting_app import hello


def make() -> App:
    logging.basicConfig(level=logging.WARNING)
    return RateLimitMiddleware(hello, "1000/minute")
