"""Starlette: WebSockets with a limit of ten connects a minute, and of three messages at once.

    uvicorn --app-dir examples starlette_websocket:app

Then exceed the limit: python -m websockets ws://localhost:8000/echo
"""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.websocket import WebSocketLimits


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():  # denied messages never get here: the client is told when to retry
        await socket.send_text(text)


limits = WebSocketLimits(received="30/minute burst 3", received_bytes="100000/minute")
app = Starlette(
    routes=[WebSocketRoute("/echo", echo)],
    middleware=[Middleware(RateLimitMiddleware, limiter="10/minute", websocket=limits)],
)
