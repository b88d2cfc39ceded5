"""The headers of WebSocket frames, read as the bytes pass by: how many frames a slice has, and of which kind."""

from typing import Final

FRAMES: Final = 4
"""Frames in a slice."""
SLICE: Final = 16 * 1024
"""Bytes of payload in a slice."""
SKIPPED: Final = 256
"""Frames that are skipped at once: about as much work as a slice."""
MAX_FRAGMENTS: Final = 1000
"""Fragments of one message."""

_LONGEST: Final = 14  # bytes of a header
_CONTINUATION: Final = 0
_WHOLE: Final = (0x81, 0x82)  # the first byte of a text or binary message in one frame
_CLOSE: Final = 8
_FIRST_CONTROL: Final = 8  # the opcodes of close, ping and pong are from here on


class FrameMeter:
    """Divides the bytes of one WebSocket into slices, and counts frames that are not whole messages.

    The payloads stay as they are, and what breaks the protocol is left to its parser.
    """

    def __init__(self) -> None:
        self._header = b""  # the part of a header that has come
        self._payload = 0  # bytes of the present frame that have not come
        self._of_message = 0  # fragments of the present message
        self.controls = 0
        """Control frames and empty fragments so far: they carry no message."""
        self.fragments = 0
        """Fragments so far."""

    @property
    def too_fragmented(self) -> bool:
        """Whether a message has too many fragments."""
        return self._of_message > MAX_FRAGMENTS

    def next_slice(self, data: bytes, start: int) -> int:
        """The end of the next slice of `data`, which begins at `start`. Every byte is measured once, in order."""
        at, end, size = start, min(start + SLICE, len(data)), len(data)
        for _ in range(FRAMES):
            if not self._payload:
                if at + 1 < size and data[at] in _WHOLE and 0x80 <= data[at + 1] < 0xFE and not self._header:
                    after = at + data[at + 1] - 0x80 + 6  # the ordinary case: a short message in one masked frame
                    if after < end:
                        at = after
                        continue
                    if after == end:
                        return end
                if start < at < size and data[at] & 0x0F == _CLOSE:
                    return at  # the messages before it come first: uvicorn could not refuse them any more
                header = self._header + data[at : at + _LONGEST]
                length = _header_length(header)
                if len(header) < length:
                    self._header = header
                    return size
                at += length - len(self._header)
                self._header = b""
                self._begin_frame(header)
            part = min(self._payload, max(end - at, 0))
            at += part
            self._payload -= part
            if at >= end:
                break
        return at

    def skip_messages(self, data: bytes, start: int) -> int:
        """Where messages end that begin at `start` and need not be parsed: those before a control frame, if whole."""
        at, size = start, len(data)
        if self._payload or self._header:  # the parser has the beginning of this frame
            return at
        for _ in range(SKIPPED):
            if at + 1 >= size or data[at] & 0x0F >= _FIRST_CONTROL:
                break
            if 0x80 <= data[at + 1] < 0xFE:
                after = at + data[at + 1] - 0x80 + 6
            else:
                header = data[at : at + _LONGEST]
                length = _header_length(header)
                if len(header) < length:
                    break
                after = at + length + _payload_length(header)
            if after > size:
                break
            at = after
        return at

    def _begin_frame(self, header: bytes) -> None:
        """Begin a frame: note the length of its payload, and count it."""
        opcode, length = header[0] & 0x0F, _payload_length(header)
        self._payload = length
        if opcode >= _FIRST_CONTROL:
            self.controls += 1
        elif opcode == _CONTINUATION or header[0] < 0x80:  # it continues a message, or has no final bit
            self.fragments += 1
            self._of_message = self._of_message + 1 if opcode == _CONTINUATION else 1
            if not length:
                self.controls += 1


def _header_length(header: bytes) -> int:
    """The length of the header that begins like this."""
    if len(header) < 2:
        return 2
    length = header[1] & 0x7F
    return 2 + (2 if length == 126 else 8 if length == 127 else 0) + (4 if header[1] & 0x80 else 0)


def _payload_length(header: bytes) -> int:
    """The length of the payload after a whole header."""
    length = header[1] & 0x7F
    if length == 126:
        return int.from_bytes(header[2:4], "big")
    return int.from_bytes(header[2:10], "big") if length == 127 else length
