"""mypyc's names for the compiled modules, which don't need mypyc at run time.

Inside a compiled module `i64` is a machine integer; everywhere else it is `int`. This module itself is never compiled.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mypy_extensions import i64 as i64
    from mypy_extensions import mypyc_attr as mypyc_attr
else:
    i64 = int

    def mypyc_attr(**_options):
        return lambda cls: cls


class Text(Protocol):
    """A `str`, to a type checker.

    A compiled function refuses a wrong argument before its first line runs, with a text that isn't ours. A protocol
    from an uncompiled module passes unchecked, so that the function can answer for itself.
    """

    def casefold(self) -> str: ...


class Unchecked(Protocol):
    """A type without values. Beside another type it keeps a compiled function from checking it, as `Text` does."""

    def __unchecked__(self) -> None: ...
