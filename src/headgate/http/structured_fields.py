"""Structured fields of HTTP (RFC 9651), as far as lists of Strings with parameters need them."""

import re
from base64 import b64decode
from binascii import Error as NotBase64
from typing import Final, TypeAlias

Bare: TypeAlias = int | float | str | bytes | bool
_STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_VALUE: Final = (
    rf"(?P<string>{_STRING})|:(?P<bytes>[A-Za-z0-9+/=]*):|\?(?P<flag>[01])|@-?\d{{1,15}}|%{_STRING}"
    r"|(?P<number>-?\d{1,15}(?:\.\d{1,3})?)|(?P<token>[A-Za-z*][!#$%&'*+.^_`|~:/\w-]*)"
)
_PARAMETER: Final = re.compile(rf";\ *(?P<name>[a-z*][a-z0-9_.*-]*)(?:=(?:{_VALUE}))?", re.ASCII)
_ITEM: Final = re.compile(_STRING, re.ASCII)
_COMMA: Final = re.compile(r"[ \t]*,[ \t]*")


def parse_items(value: str) -> list[tuple[str, dict[str, Bare]]]:
    """Strings and their parameters; none at all if any part of the field is malformed, as the RFC requires."""
    found: list[tuple[str, dict[str, Bare]]] = []
    text, at = value.strip(" "), 0
    while at < len(text):
        item = _ITEM.match(text, at)
        if item is None:
            return []
        at, parameters = item.end(), {}
        while (parameter := _PARAMETER.match(text, at)) is not None:
            at = parameter.end()
            bare = _parse_value(parameter)
            if bare is None:
                return []
            parameters[parameter["name"]] = bare
        found.append((_unquote(item[0]), parameters))
        if at == len(text):
            return found
        comma = _COMMA.match(text, at)
        if comma is None or comma.end() == len(text):
            return []
        at = comma.end()
    return found


def _parse_value(parameter: re.Match[str]) -> Bare | None:
    if (text := parameter["number"]) is not None:
        return float(text) if "." in text else int(text)
    if (text := parameter["string"]) is not None:
        return _unquote(text)
    if (text := parameter["bytes"]) is not None:
        try:
            return b64decode(text, validate=True)
        except NotBase64:
            return None
    return parameter["flag"] != "0"  # or without a value; a token, date or display string means nothing here


def _unquote(string: str) -> str:
    return re.sub(r"\\(.)", r"\1", string[1:-1])


def format_string(text: str) -> str:
    """A String, of a text that is made printable."""
    return '"' + as_printable(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def as_printable(text: str) -> str:
    """A text that a String can hold: characters other than printable ASCII become question marks."""
    return text if text.isascii() and text.isprintable() else "".join(c if " " <= c <= "~" else "?" for c in text)
