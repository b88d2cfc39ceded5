"""Starlette: WebSockets whose clients may connect ten times a minute, and send three messages at once.

    uvicorn --app-dir examples starlette_websocket:app

Then send more than it allows: python -m websockets ws://localhost:8000/echo
"""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket

from headgate.edges.asgi import RateLimitMiddleware
from headgate.edges.websocket import WebSocketLimits


async def echo(socket: WebSocket) -> None:
    await socket.accept()
    async for text in socket.iter_text():  # what is denied never comes here: its sender is told when to try again
        await socket.send_text(text)


limits = WebSocketLimits(received="30/minute burst 3", received_bytes="100000/minute")
app = Starlette(
    routes=[WebSocketRoute("/echo", echo)],
    middleware=[Middleware(RateLimitMiddleware, limiter="10/minute", websocket=limits)],
)
