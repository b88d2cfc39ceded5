"""Shapes of holds: texts that many holds have in common, each of which is stored once for its root."""

from hashlib import blake2b
from time import monotonic
from typing import Final

_MOST: Final = 10_000  # that this process knows
_AGAIN_AFTER: Final = 3600.0  # seconds after which one is stored again, long before the server drops it
_DIGEST_SIZE: Final = 8


class Shapes:
    """The digests of shapes, and when this process has stored them last."""

    def __init__(self) -> None:
        self._digests: Final[dict[str, bytes]] = {}
        self._stored: Final[dict[tuple[bytes, bytes], float]] = {}

    def digest(self, shape: str) -> bytes:
        found = self._digests.get(shape)
        if found is None:
            if len(self._digests) >= _MOST:
                self._digests.clear()
            found = blake2b(shape.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_SIZE).digest()
            self._digests[shape] = found
        return found

    def is_stored(self, root: bytes, digest: bytes) -> bool:
        """Whether this process has stored it a short while ago."""
        return self._stored.get((root, digest), 0.0) > monotonic()

    def note_stored(self, root: bytes, digest: bytes) -> None:
        if len(self._stored) >= _MOST:
            self._stored.clear()
        self._stored[root, digest] = monotonic() + _AGAIN_AFTER
