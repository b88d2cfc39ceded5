"""How bytes of a WebSocket become frames: a little at a time.

uvicorn reads up to 256 KiB at once from a socket and parses all of it before anything else happens. Of small frames
that is thousands, and hundreds of connections that flood would keep the loop busy for seconds and fill the memory. Here
a connection is parsed by the kibibyte, the next one when what came of the last is handled, and the kernel is asked to
keep little in store for it, so that a flood waits at the flooder's.
"""

import asyncio
import socket
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SLICE: Final = 1024
KERNEL: Final = 32 * 1024


class PatientProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which parses a slice at a time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ahead = b""  # what was read and not yet parsed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        opened = transport.get_extra_info("socket")
        if opened is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL)

    def data_received(self, data: bytes) -> None:
        self._ahead += data
        self._parse()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.queue.empty():
            self._parse()
            if self.read_paused and self.queue.empty():
                self.read_paused = False
                self.transport.resume_reading()
        return message

    async def send(self, message: Any) -> None:
        await self.writable.wait()
        if self.close_sent:  # by the protocol itself, as after a frame that breaks its rules: uvicorn blames the caller
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # uvicorn would log that it is not

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # which uvicorn would log with a traceback, whoever sends it
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def _parse(self) -> None:
        """Parse until there is something to handle, or nothing left."""
        while self._ahead and (self.queue.empty() or self.close_sent):
            part, self._ahead = self._ahead[:SLICE], self._ahead[SLICE:]
            super().data_received(part)
