"""The type of the fixture `verb`."""

from collections.abc import Callable
from typing import Any, TypeAlias

Verbs: TypeAlias = Callable[[Any, str], Callable[..., Any]]
