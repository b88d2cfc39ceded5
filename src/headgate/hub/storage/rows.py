"""Rows of the database, of which some may be unreadable: damaged, or written by another version.

An unreadable row is skipped. It never stops the hub, and never makes other rows unreadable. The first of each table is
logged, without the row's content.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
import structlog
from msgspec import Meta, Raw

from headgate.errors import HeadgateError

T = TypeVar("T")
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
"""Seconds since 1970."""
ReadRow: TypeAlias = Callable[[tuple[Any, ...]], T]
"""Reads a row, or raises one of `_ERRORS`."""

_ERRORS: Final = (msgspec.MsgspecError, HeadgateError, ValueError, TypeError, RecursionError)
_json: Final = msgspec.json.Decoder(Raw)

_log = structlog.get_logger("headgate.hub")


class RowReader:
    """Reads the rows of one database."""

    def __init__(self) -> None:
        self._reported: Final[set[str]] = set()  # tables

    def read(self, table: str, rows: Iterable[tuple[Any, ...]], read: ReadRow[T], effect: str) -> Iterator[T]:
        """The readable rows. `effect` tells the operator what is missing because of the others."""
        count, example, reason = 0, "", ""
        try:
            for row in rows:
                try:
                    found = read(row)
                except _ERRORS as error:
                    count += 1
                    example, reason = example or f"{row[0]!r:.100}", reason or f"{error!s:.200}"
                    continue
                yield found
        finally:
            if count and table not in self._reported:
                self._reported.add(table)
                _log.error(
                    "unreadable rows skipped", table=table, count=count, example=example, reason=reason, effect=effect
                )


def row_of(kind: type[T]) -> ReadRow[T]:
    """Reads a row into a named tuple, whose annotations validate it."""
    return lambda row: msgspec.convert(row, kind, builtin_types=(bytes,))


def json_of(stored: object) -> Raw:
    """JSON that was stored, unless it is malformed."""
    if not isinstance(stored, bytes):
        raise TypeError(f"expected JSON, got {type(stored).__name__}")
    stored.decode()
    return _json.decode(stored)
