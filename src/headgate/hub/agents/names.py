"""The names that new agents may have: what an operator reads is what was registered, and no name passes for another.

This is the "highly restrictive" level of Unicode's UTS 39, for the scripts in general use, without its tables: the
script of a letter is the first word of its Unicode name. docs/decisions/0015-names.md has the reasons.
"""

import re
import unicodedata
from typing import Final, NoReturn
from urllib.parse import unquote

from headgate.errors import InvalidInput
from headgate.gate.accounts import NO_ACCOUNT
from headgate.gate.policy import check_agent

RESERVED: Final = frozenset([".", "..", "defaults", "whitelist"])
"""Names that no agent can have: a path of the hub with one of them is another path, or none.

The hub derives them from its route table. They are repeated here for clients, which have no route table; a test
compares the two.
"""

DOTS: Final = frozenset([".", ".."])
"""Names that lead elsewhere below any path."""

ADMIN: Final = "admin"
VIEWER: Final = "viewer"
ROLES: Final = (ADMIN, VIEWER)
"""The roles of operators."""
BUILT_IN: Final = frozenset(ROLES)
"""The names of the built-in operators, in the record of changes. No agent can have one of them, nor one like them."""

_COMMON: Final = """
LATIN GREEK CYRILLIC ARMENIAN HEBREW ARABIC THAANA DEVANAGARI BENGALI GURMUKHI GUJARATI ORIYA TAMIL TELUGU KANNADA
MALAYALAM SINHALA THAI LAO TIBETAN MYANMAR GEORGIAN HANGUL ETHIOPIC KHMER HIRAGANA KATAKANA BOPOMOFO CJK
"""
_SCRIPTS: Final = frozenset(_COMMON.split())
_ALIASES: Final = {
    "IDEOGRAPHIC": "CJK",
    "KATAKANA-HIRAGANA": "KATAKANA",
    "ARABIC-INDIC": "ARABIC",
    "EXTENDED": "ARABIC",  # EXTENDED ARABIC-INDIC DIGIT …
}
_TOGETHER: Final = (
    frozenset(["LATIN", "CJK", "HIRAGANA", "KATAKANA"]),
    frozenset(["LATIN", "CJK", "HANGUL"]),
    frozenset(["LATIN", "CJK", "BOPOMOFO"]),
)
"""Scripts that are written together."""
_LATIN: Final = frozenset("æÆøØœŒßẞðþÞđĐħĦıłŁŋŊŧŦəƏɛƐɔƆɓƁɗƊƙƘɣƔʋƲƴƳ")
"""Letters of living alphabets that are no ASCII letter with a mark. Phonetic letters look like others."""
_LIKE_LATIN: Final = frozenset(
    "асԁеһіјӏорԛѕԝхуѵҽѡАВЕКМНОРСТУХІЈЅԌԚԜӀЬ"  # Cyrillic
    "αικνορυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧϲϳϹͿ"  # Greek
    "օոսհցզյլՕՏԼՍ"  # Armenian
)
"""Letters that look like Latin ones."""
_LIKE_BUILT_IN: Final = str.maketrans("\u01311l|!đɗðəɛŋʋ", "iiiiidddeenv")
"""Characters that a name may have and that look like letters of the built-in names; those with marks lose them."""
_MIDDLE_DOT: Final = "\u30fb"  # between the words of a Japanese name
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Characters that can be printed, but not seen."""
_SECOND_DOT: Final = re.compile("[ij\u0131\u0237\u03f3\u0456\u0458][\u0300-\u036f]*\u0307")
"""A dot above a letter that has one, decomposed: the two look like one. Turkish \u0130 is a capital."""
_MOST_MARKS: Final = 2  # on one letter
_NO_PATH: Final = f"a name without the parts {', '.join(sorted(RESERVED))}, which the hub uses in its paths"
_NO_DOTS: Final = f"a name without the parts {' and '.join(sorted(DOTS))}, which lead to another path"


def check_path_name(given: object, *, beside_routes: bool = True) -> str:
    """The name of an agent that a client puts into a path. Percent-encoded, it leads to this agent and nowhere else.

    A name with a reserved part is refused, too. On the way there may be a proxy that decodes the path and resolves its
    dots: `a/../defaults` would then change everybody's limits. Where no route stands beside the names, only dots are
    refused, so that whatever agent was registered before can be stopped.
    """
    name = check_agent(given)
    if _has_part(name, RESERVED if beside_routes else DOTS):
        _refuse(_NO_PATH if beside_routes else _NO_DOTS, name)
    return name


def _has_part(name: str, parts: frozenset[str]) -> bool:
    return not parts.isdisjoint(re.split(r"[/\\]", unquote(name)))


def looks_built_in(name: str) -> bool:
    """Whether a name is that of a built-in operator, or passes for it: `Admin`, `vïewer`, `adrnin`."""
    letters = [one for one in unicodedata.normalize("NFKD", name.casefold()) if not unicodedata.combining(one)]
    return "".join(letters).translate(_LIKE_BUILT_IN).replace("rn", "m").replace("vv", "w") in BUILT_IN


def check_new_name(given: object) -> str:
    """The name of a new agent. Any other is refused with the reason, and with the normal form if that would do."""
    name = check_agent(given)
    if _has_part(name, RESERVED) and name not in RESERVED:  # the registry refuses these, with an error of its own
        _refuse(_NO_PATH, name)
    normal = re.sub(" +", " ", unicodedata.normalize("NFKC", name)).strip()
    if name == normal:
        _check_characters(name)
    elif _is_good(normal):
        _refuse(f"the normal form {normal!r}: NFKC, without outer or double blanks", name)  # not escaped: to be copied
    else:
        _check_characters(name)
        _refuse("the normal form NFKC, without outer or double blanks", name)
    return name


def _is_good(name: str) -> bool:
    try:
        _check_characters(check_agent(name))
    except InvalidInput:
        return False
    return True


def _check_characters(name: str) -> None:
    """Refuse a name that could mislead."""
    if name == NO_ACCOUNT:
        _refuse("another name, since this one stands for a missing account in paths", name)
    if _INVISIBLE.search(name):
        _refuse("no invisible characters", name)
    if _SECOND_DOT.search(unicodedata.normalize("NFD", name)):
        _refuse("no further dot on a letter that has one", name)
    scripts = _scripts(name)
    if len(scripts) > 1 and not any(scripts <= together for together in _TOGETHER):
        _refuse(f"letters of one script, not of {' and '.join(sorted(map(str.title, scripts)))} together", name)
    letters = [one for one in unicodedata.normalize("NFKD", name) if one.isalpha()]
    if letters and all(one in _LIKE_LATIN for one in letters):
        _refuse(f"a name that can't pass for a Latin one, as these {scripts.pop().title()} letters do", name)


def _scripts(name: str) -> set[str]:
    """The scripts of a name. A character that no name may have is refused."""
    scripts, marks = set(), _MOST_MARKS  # a name can't begin with a mark
    for one in name:
        kind = unicodedata.category(one)
        marks = marks + 1 if kind[0] == "M" else 0
        if marks > _MOST_MARKS:
            _refuse(f"at most {_MOST_MARKS} marks on each letter", name)
        script = _script(one, kind)
        if script and (script not in _SCRIPTS or (script == "LATIN" and not _is_common(one))):
            _refuse(f"letters and digits of common alphabets and ASCII signs, not U+{ord(one):04X}", name)
        scripts.add(script)
    return scripts - {""}


def _script(one: str, kind: str) -> str:
    """The script of a character: "" for one that all scripts share, another word for one that no name may have."""
    if one.isascii() and not one.isalpha():
        return ""
    if one == _MIDDLE_DOT:
        return "KATAKANA"
    word = unicodedata.name(one, "UNKNOWN").partition(" ")[0]
    if kind[0] == "M" and word == "COMBINING":
        return ""
    return _ALIASES.get(word, word) if kind[0] in "LM" or kind == "Nd" or one == "\u3007" else kind


def _is_common(one: str) -> bool:
    return one in _LATIN or unicodedata.normalize("NFKD", one)[0].isascii()


def _refuse(expected: str, name: str) -> NoReturn:
    raise InvalidInput(f"agent: expected {expected}, got {name!a}")  # escaped, since lookalikes can't be told apart
