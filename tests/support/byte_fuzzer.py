"""Streams of bytes for a hub, from a seed: HTTP requests and WebSocket frames that are almost what they should be.

The same seed and number make the same stream. Tokens differ from hub to hub, so a stream has stand-ins for them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from headgate.hub.api.routes import ROUTES
from tests.support.fuzz_campaign import AGENTS, HANDSHAKE
from tests.support.fuzz_inputs import ESCAPES, HEADERS, ILL_HEADS, METHODS
from tests.support.fuzzer import Fuzzer, websocket_frame
from tests.support.hub import VIEWER
from tests.support.hub_process import PLENTY

TOKENS = {agent: f"stand-in-{agent}-".ljust(43, "x") for agent in AGENTS}
"""The stand-ins, as long as tokens are."""
LONGEST = 300_000
"""Bytes of a stream."""
ENDINGS = ("half-close", "close", "reset", "wait")
"""How a stream ends: by a FIN after which the hub has to close too, by closing at once, by a RST, or by a RST after the
hub had a moment to answer."""
LENGTHS = (
    b"0", b"1", b"5", b"00005", b"-1", b"-0", b"+5", b"5 ", b"5,5", b"5, 6", b"0x5", b"5.0", b"1e3", b"", b"\xb2",
    b"2147483648", b"4294967296", b"9223372036854775807", b"9223372036854775808", b"18446744073709551615",
    b"18446744073709551616", b"9" * 40,
)  # fmt: skip
CHUNK_SIZES = (
    b"0", b"5", b"05", b"5;a=b", b'5;a="\r\n"', b"5 ", b" 5", b"-5", b"+5", b"0x5", b"g", b"", b"7fffffff", b"ffffffff",
    b"7fffffffffffffff", b"8000000000000000", b"ffffffffffffffff", b"1" + b"0" * 30, b"5;" + b"x" * 9000,
)  # fmt: skip
HEADER_LINES = (
    b" folded", b"\tfolded", b"X: a\r\n b", b"X : a", b"X\0: a", b"X: a\0b", b"X: a\rb", b"X: a\nb", b"X", b":", b": a",
    b"\xff: a", b"X: \xff", b"Host: a\r\nHost: b", b"Host:", b"Host: [::1", b"Host: a:99999", b"Connection: close",
    b"Connection: keep-alive, Upgrade", b"Connection: upgrade\r\nUpgrade: h2c", b"Upgrade: websocket",
    b"Expect: 100-continue", b"Expect: x", b"Trailer: X", b"TE: x",
    b"Keep-Alive: timeout=-1", b"Content-Encoding: gzip", b"Sec-WebSocket-Key: x", b"HTTP2-Settings: AAMAAABk",
    b"Proxy-Connection: x", b"X-Forwarded-For: \xff, ,,[", b"Cookie: " + b"a=b;" * 2000, b"A: b\r\n" * 200, b"Q" * 9000,
)  # fmt: skip
ENCODINGS = (
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked", b"transfer-encoding:chunked",
    b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding:\tchunked",
    b"Transfer-Encoding: xchunked", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5", b"Transfer-Encoding:\r\n chunked",
)  # fmt: skip
CHUNK_ENDS = (
    b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b"0\r\n" + b"X: y\r\n" * 500 + b"\r\n", b"0\r\n", b"0", b"",
)  # fmt: skip
VERSIONS = (
    b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2", b"HTTP/11", b"HTTP/1.",
    b"http/1.1", b"HTTP/1.1 ", b"", b"ICE/1.0", b"RTSP/1.0", b"HTTP/1.1\r", b"HTTP/\xff.1",
)  # fmt: skip
CLOSES = (
    0, 1, 999, 1000, 1001, 1004, 1005, 1006, 1007, 1010, 1011, 1012, 1015, 1016, 2999, 3000, 4000, 4999, 5000, 65_535,
)  # fmt: skip
TEXTS = (
    b"", b"{}", b"\xc3", b"\xa9", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\0", b"x" * 125, b"x" * 126, b"x" * 1000,
)  # fmt: skip
LARGE_TEXTS = (b"x" * 65_535, b"x" * 65_536, b'"' + b"x" * 131_000 + b'"')
WIDTHS = (0, 126, 127, 65_535, 65_536, 2**31, 2**63 - 1, 2**63, 2**64 - 1)
"""Lengths that frames say they have."""


@dataclass(frozen=True)
class Stream:
    """What one connection sends."""

    name: str
    """The seed and the number."""
    kind: str
    parts: tuple[bytes, ...]
    """Written one after the other."""
    upgrades: bool
    """Whether the first part is a handshake whose answer is waited for."""
    ending: str

    def for_hub(self, tokens: Mapping[str, str]) -> tuple[bytes, ...]:
        """The parts with the tokens of a hub."""
        parts = self.parts
        for agent, stand_in in TOKENS.items():
            if any(b"stand-in" in part for part in parts):
                parts = tuple(part.replace(stand_in.encode(), tokens[agent].encode()) for part in parts)
        return parts

    def write(self, folder: Path) -> Path:
        """Write it to a file, from which it can be read again."""
        folder.mkdir(exist_ok=True)
        file = folder / f"{self.name.replace('/', '-')}.json"
        parts = [part.decode("latin-1") for part in self.parts]
        told = {"name": self.name, "kind": self.kind, "upgrades": self.upgrades, "ending": self.ending, "parts": parts}
        file.write_text(json.dumps(told, indent=1))
        return file

    @classmethod
    def read(cls, file: Path) -> "Stream":
        told = json.loads(file.read_text())
        parts = tuple(part.encode("latin-1") for part in told.pop("parts"))
        return cls(parts=parts, **told)


class ByteFuzzer:
    """Makes streams."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._fuzzer = Fuzzer(seed, TOKENS, "not-the-token-of-an-admin", VIEWER, [PLENTY])
        self.random = Random(seed)

    def stream(self, number: int) -> Stream:
        """The stream of a number."""
        name = f"{self._seed}/{number}"
        self.random = self._fuzzer.random = Random(name)
        kinds: dict[str, Callable[[], list[bytes]]] = {
            "requests": self._requests,
            "head": self._head,
            "chunks": self._chunks,
            "upgrade": self._upgrade,
            "frames": self._frames,
            "conversation": self._conversation,
        }
        kind = self.random.choices(list(kinds), (4, 4, 3, 2, 8, 4))[0]
        pieces = kinds[kind]()
        upgrades = kind in ("frames", "conversation")
        first = [pieces.pop(0)] if upgrades else []
        if self.random.random() < 0.5:
            pieces = self._mutated(pieces)
        sent = b"".join(pieces)[:LONGEST]
        if upgrades and self.random.random() < 0.1:  # all at once, or not quite a handshake
            sent, first, upgrades = b"".join(first) + sent, [], False
            if self.random.random() < 0.3:
                sent = self._fuzzer.broken(sent[:2000])
        parts = (*first, *self._split(sent))
        return Stream(name, kind, parts, upgrades, self.random.choices(ENDINGS, (4, 1, 3, 3))[0])

    # The stream as a whole --------------------------------------------------------------------------------------------

    def _mutated(self, pieces: list[bytes]) -> list[bytes]:
        """Pieces that are repeated, left out, exchanged or broken."""
        random, pieces = self.random, list(pieces)
        for _ in range(random.randint(1, 3)):
            at, how = random.randrange(len(pieces)), random.randrange(6)
            if how == 0:
                pieces[at] = pieces[at] * random.choice((2, 3, 50))
            elif how == 1:
                random.shuffle(pieces)
            elif how == 2:
                pieces.insert(at, random.randbytes(random.choice((1, 2, 10, 1000))))
            else:
                pieces[at] = self._fuzzer.broken(pieces[at])
            pieces = [piece[:LONGEST] for piece in pieces]
        return pieces

    def _split(self, sent: bytes) -> list[bytes]:
        """Bytes as they are written: at once, in a few parts, or one by one."""
        how, size = self.random.random(), len(sent)
        if how < 0.1 and size <= 400:
            return [sent[at : at + 1] for at in range(size)]
        if how < 0.5 and size > 1:
            cuts = [0, *sorted(self.random.randrange(1, size) for _ in range(self.random.randint(1, 5))), size]
            return [sent[low:high] for low, high in pairwise(cuts) if low < high]
        return [sent]

    # HTTP -------------------------------------------------------------------------------------------------------------

    def _requests(self) -> list[bytes]:
        """Requests of every quality, one after the other."""
        return [self._fuzzer.request().raw for _ in range(self.random.choice((1, 2, 4, 30)))]

    def _target(self) -> bytes:
        random = self.random
        path = (
            random.choice(ROUTES).path if random.random() < 0.8 else random.choice(("*", "http://hub/live", "//", "?"))
        )
        for _ in range(random.choice((0, 0, 1, 3))):
            at = random.randrange(len(path) + 1)
            path = path[:at] + random.choice(ESCAPES) + path[at:]
        return path.encode()

    def _start(self, *, least: int = 0) -> list[bytes]:
        """The lines of a head without its end: with some that no head should have, at least so many."""
        random = self.random
        line = b" ".join([random.choice(METHODS).encode(), self._target(), random.choice(VERSIONS)])
        lines = [line, *random.sample(HEADER_LINES + tuple(HEADERS), random.randint(least, 4))]
        if random.random() < 0.7:
            lines.insert(1, b"Host: localhost")
        return lines

    def _head(self) -> list[bytes]:
        """Requests with odd lines, lengths and ends of lines."""
        requests = []
        for _ in range(self.random.choice((1, 1, 2, 5))):
            lines = self._start(least=1)
            if self.random.random() < 0.6:
                lines.append(b"Content-Length: " + self.random.choice(LENGTHS))
            if self.random.random() < 0.2:
                lines.append(self.random.choice(ENCODINGS))
            end = self.random.choices((b"\r\n", b"\n", b"\r", b"\r\r\n", b"\0"), (20, 2, 1, 1, 1))[0]
            requests.append(end.join([*lines, b"", self.random.choice((b"", b"hello", b"0\r\n\r\n"))]))
        return requests

    def _chunks(self) -> list[bytes]:
        """A body in chunks, of which some aren't."""
        random = self.random
        agent = random.choice(AGENTS)
        lines = [
            b"POST /api/messages HTTP/1.1",
            b"Host: localhost",
            f"Authorization: Bearer {TOKENS[agent]}".encode(),
            random.choice(ENCODINGS),
        ]
        pieces = [b"\r\n".join([*lines, b"", b""])]
        for _ in range(random.choice((1, 3, 200))):
            size = random.choice(CHUNK_SIZES) if random.random() < 0.4 else b"5"
            pieces.append(size + b"\r\nhello" + random.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"")))
        pieces.append(random.choice(CHUNK_ENDS))
        if random.random() < 0.3:
            pieces.append(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return pieces

    def _upgrade(self) -> list[bytes]:
        """Something that is almost a handshake, before or after other things."""
        random = self.random
        upgrade = self._fuzzer.handshake()
        if random.random() < 0.3:
            more = b"Content-Length: %b\r\n" % random.choice(LENGTHS)
            upgrade = f"GET /ws {HANDSHAKE}".encode() + more + b"\r\n" + random.choice((b"", b"hello"))
        others = (b"", b"GET /live HTTP/1.1\r\n\r\n", upgrade, websocket_frame(1, b"{}"), random.choice(ILL_HEADS))
        return [random.choice(others), upgrade, random.choice(others)]

    # WebSocket --------------------------------------------------------------------------------------------------------

    def _opened(self) -> list[bytes]:
        """A handshake, and perhaps who the agent is."""
        random = self.random
        path = random.choices(("/ws", "/relay", "/ws/dashboard"), (7, 2, 1))[0]
        pieces = [f"GET {path} {HANDSHAKE}\r\n".encode()]
        if path == "/ws" and random.random() < 0.7:
            agent = random.choice(AGENTS)
            identify = {"type": "identify", "agent_id": agent, "token": TOKENS[agent]}
            pieces.append(websocket_frame(1, json.dumps(identify).encode()))
        return pieces

    def _frames(self) -> list[bytes]:
        """Frames of any form, in any order."""
        count = self.random.choice((1, 2, 5, 20, 100))
        return [*self._opened(), *[self._frame() for _ in range(count)]]

    def _conversation(self) -> list[bytes]:
        """Messages as an agent sends them, with something ill among them."""
        messages = [self._fuzzer.message(self._fuzzer.frame()[1]) for _ in range(self.random.choice((1, 3, 8)))]
        messages.insert(self.random.randrange(len(messages) + 1), self._fuzzer.ill_message())
        return [*self._opened(), *messages]

    def _frame(self) -> bytes:
        """A frame of any form: opcode, bits, mask and length are as they come."""
        random = self.random
        opcode = random.choice((0, 0, 1, 1, 2, 8, 9, 10, random.randrange(16)))
        fin, reserved = random.random() < 0.6, random.choice((0, 0, 0, 0, 0x40, 0x20, 0x10, 0x70))
        if opcode == 8:
            payload = random.choice(CLOSES).to_bytes(2, "big")[: random.choice((0, 1, 2, 2, 2))]
            payload += random.choice((b"", b"bye", b"\xff", b"x" * 123, b"x" * 124))
        else:
            payload = self._fuzzer.frame()[1] if random.random() < 0.3 else random.choice(TEXTS)
            if random.random() < 0.01:
                payload = random.choice(LARGE_TEXTS)
        if random.random() < 0.6:
            return websocket_frame(opcode, payload, fin=fin, more=reserved, mask=random.getrandbits(32))
        length = random.choice((len(payload), len(payload) + 1, *WIDTHS))
        masked = 0x80 * (random.random() < 0.7)
        form = random.randrange(3)
        if form == 0:
            field = bytes([masked | min(length, 125)])
        else:
            wide = (0, 2, 8)[form]
            field = bytes([masked | (125 + form)]) + min(length, 2 ** (8 * wide) - 1).to_bytes(wide, "big")
        return bytes([0x80 * fin | reserved | opcode]) + field + (b"\0\0\0\0" if masked else b"") + payload
