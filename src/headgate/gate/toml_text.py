"""Settings as TOML: their text, and the path of each value, such as `limits.ws.heavy`."""

from collections.abc import Iterator, Mapping
from typing import Any

from headgate.limits.decision import Limit


def to_toml(settings: Mapping[str, Any]) -> str:
    """The text of a file with these settings."""
    return "\n".join(_lines(settings, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and plain:
        yield f"\n[{'.'.join(map(toml_key, path))}]"
    for key, value in plain.items():
        yield f"{toml_key(key)} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines(value, (*path, key))


def flatten(settings: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Each value with its path."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{path}{toml_key(key)}.")
        else:
            yield f"{path}{toml_key(key)}", value


def toml_key(name: str) -> str:
    """A key in TOML: quoted unless it is bare."""
    bare = name.isascii() and name.replace("-", "_").replace("_", "a").isalnum()
    return name if bare else _quoted(name)


def toml_value(value: object) -> str:
    """The text of a value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def limit_setting(limit: Limit) -> str | list[str]:
    """A limit as a setting: its text, or those of its parts."""
    texts = [str(part) for part in limit.parts]
    return texts[0] if len(texts) == 1 else texts


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
