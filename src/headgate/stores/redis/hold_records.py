"""The stored record of a hold, as far as a reader needs it without its asks: see lua/holds.lua."""

from struct import Struct, error, unpack_from
from typing import Final, NamedTuple

from headgate.stores.holds import CANCELLED, EXPIRED, OPEN, SETTLED, HoldState, ListedHold

_STATES: Final[tuple[HoldState, ...]] = (OPEN, SETTLED, CANCELLED)  # from 1 on
_HEAD: Final = Struct("<BBBdd")
_WIDE: Final = 2  # of the flags
_SEVERAL: Final = 4
_CHECKSUM: Final = 4  # bytes


class HoldRecord(NamedTuple):
    """A hold as it is stored."""

    state: HoldState
    finish: int
    """When its lease ends, or it was settled."""
    keep: int
    costs: tuple[int, ...]
    digest: bytes
    """Of its shape; empty without one."""
    note: str

    def listed(self, hold_id: str, now: int, shape: str) -> ListedHold:
        left = max(self.finish - now, 0) if self.state == OPEN else 0
        state = EXPIRED if self.state == OPEN and not left else self.state
        return ListedHold(hold_id, state, self.costs, left, self.note, shape)


def read_record(stored: object, now: int) -> HoldRecord | None:
    """The hold in a string, if it is ours and still remembered."""
    if not isinstance(stored, bytes):
        return None
    try:
        state, flags, asks, finish, keep = _HEAD.unpack_from(stored)
        at = _HEAD.size
        costs = tuple(map(int, unpack_from(f"<{asks}{'d' if flags & _WIDE else 'I'}", stored, at)))
        at += asks * (8 if flags & _WIDE else 4)
        digest = stored[at + 1 : at + 1 + stored[at]]
        at += 1 + stored[at]
        (length,) = unpack_from("<H", stored, at)
        note = stored[at + 2 : at + 2 + length].decode("utf-8", "surrogatepass")
        known = HoldRecord(_STATES[state - 1], int(finish), int(keep), costs, digest, note)
    except (error, IndexError, ValueError, OverflowError):
        return None
    at += 2 + length + (_CHECKSUM if known.state == OPEN else 0)
    rest = len(stored) - at
    whole = rest == 0 or (known.state == OPEN and rest > 0 and (bool(flags & _SEVERAL) or rest % 8 == 0))
    return known if whole and asks > 0 and state > 0 and known.finish + known.keep > now else None
