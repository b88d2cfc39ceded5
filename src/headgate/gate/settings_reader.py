"""Reads settings from a file or a program, and collects the mistakes in them."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from headgate.errors import InvalidInput, refuse
from headgate.gate.toml_text import toml_key

T = TypeVar("T")


class SettingsReader:
    """Reads values by their paths. A value that can't be used is a mistake, and its default is taken instead."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def add_mistake(self, path: str, expected: str, got: object) -> None:
        try:
            refuse(path, expected, got)
        except InvalidInput as error:
            self.mistakes.append(str(error))

    def parsed(self, path: str, value: object, read: Callable[[object], T]) -> T | None:
        try:
            return read(value)
        except InvalidInput as error:
            self.mistakes.append(f"{path}: {str(error).partition(': ')[2]}")
            return None

    def value(
        self, path: str, table: Mapping[str, Any], default: T, read: Callable[[object], T], key: str | None = None
    ) -> T:
        key = path.rpartition(".")[2] if key is None else key
        if key not in table:
            return default
        value = self.parsed(path, table[key], read)
        return default if value is None else value

    def values(
        self, path: str, given: object, read: Callable[[object], T], within: tuple[int, int] | None = None
    ) -> list[T]:
        if not isinstance(given, (list, tuple, set, frozenset)):
            self.add_mistake(path, "a list", given)
            return []
        if within is not None and not within[0] <= len(given) <= within[1]:
            self.add_mistake(path, f"a list of {within[0]} to {within[1]} entries", given)
            return []
        found = [self.parsed(f"{path}[{i}]", value, read) for i, value in enumerate(given)]
        return [value for value in found if value is not None]

    def table(self, key: str, settings: Mapping[str, Any], path: str | None = None) -> Mapping[str, Any]:
        table = settings.get(key, {})
        if isinstance(table, Mapping) and all(isinstance(name, str) for name in table):
            return table
        self.add_mistake(path or key, "a table", table)
        return {}

    def check_keys(
        self, path: str, table: Mapping[str, Any], known: Sequence[str], to_add: Callable[[str], str] = lambda _: ""
    ) -> None:
        """Refuse unknown keys. `to_add` is the setting that adds one, "" if none does."""
        for key in table:
            if key not in known:
                setting = "" if isinstance(table[key], Mapping) else to_add(key)
                self.mistakes.append(unknown_key(path, key, known, setting and f"or add it: {setting}"))


def unknown_key(path: str, key: str, known: Sequence[str], otherwise: str = "") -> str:
    """The mistake of an unknown key. The nearest known one comes first; if none is near, `otherwise` is the hint."""
    near = difflib.get_close_matches(key, known, 1)
    names = [*near, *[name for name in known if name not in near]]
    hint = f"did you mean {near[0]}?" if near else otherwise
    where = f"{path}.{toml_key(key)}".lstrip(".")
    return f"{where}: expected one of {', '.join(names)}" + (f" ({hint})" if hint else "")
