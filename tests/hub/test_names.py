# ruff: noqa: RUF001 - lookalikes are the subject
"""The names of new agents: what operators read is what was registered, and no name passes for another."""

import re
import unicodedata
from ast import literal_eval
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import Gate
from headgate.errors import InvalidInput
from headgate.hub.agents.names import check_new_name
from headgate.hub.agents.registry import DatabaseAgents, Registry
from headgate.hub.agents.tokens import digest_of
from headgate.hub.storage.database import Database
from tests.support.hub import ADMIN, hub_server

GOOD = [
    "planner", "Planner-7", "a/b?c#d%2e &'\"", "<img src=x onerror=alert(1)>", "n" * 128, "agent 007", "a:ws", "10",
    "[x]", "Größe", "naïve", "kırmızı", "İzmir", "Łódź", "Đorđe", "đường", "tiếng-Việt", "ẹ\u0301kọ́", "æøå", "Ɛwe",
    "планировщик", "Диспетчер 2", "σχεδιαστής", "Պլանավորող", "מתכנן", "مخطط", "مخطط-٢", "योजनाकार", "পরিকল্পক",
    "திட்டமிடுபவர்", "ผู้วางแผน", "დამგეგმავი", "አቀናባሪ", "អ្នករៀបចំ", "计划者", "計画エージェント", "プランナー・A",
    "みどり-agent", "플래너", "플래너 A", "agent-東京", "ㄅㄆㄇ", "〇々",
]  # fmt: skip

BAD = {
    " planner": "outer blank",
    "planner ": "outer blank",
    "plan  ner": "two blanks look like one",
    "ｐｌａｎｎｅｒ": "full width",
    "e\u0301clair": "decomposed",
    "ﬁle": "a ligature",
    "plan\u2024ner": "a one dot leader",
    "𝐩lanner": "a mathematical letter",
    "pl\u0430nner": "a Cyrillic letter",
    "\u0440lanner": "a Cyrillic letter",
    "plann\u03b5r": "a Greek letter",
    "\u043f\u043b\u0430\u043dner": "half Cyrillic",
    "сосоа": "all Cyrillic, and looks like cocoa",
    "ѕсоре-7": "all Cyrillic, and looks like scope-7",
    "ΑΒΑΚΟΝ": "all Greek, and looks like ABAKON",
    "pl\u0251nner": "a phonetic letter",
    "planne\u027e": "a phonetic letter",
    "plan\u02d0ner": "a modifier letter",
    "plan\u2010ner": "a hyphen that isn't ASCII",
    "plan\u2215ner": "a slash that isn't ASCII",
    "plan\u3164ner": "a filler",
    "\u3164": "a filler",
    "plan\u034fner": "a joiner",
    "plan\ufe0fner": "a variation selector",
    "\u2800": "a blank Braille cell",
    "plan\u200bner": "a blank without width",
    "plan\u202ener": "a change of direction",
    "plan\u00adner": "a soft hyphen",
    "plan\u0000ner": "a control character",
    "plan\nner": "a line break",
    "plan\u00a0ner": "a blank that isn't ASCII",
    "\u0301planner": "a mark without a letter",
    "pl\u0332\u0333\u0331anner": "a stack of marks",
    "pi\u0307lot": "a dot that looks like that of the letter",
    "p\u012f\u0307lot": "the same, after another mark",
    "p\u0131\u0307lot": "a dot on a letter without one",
    "пілот".replace("і", "і\u0307"): "a dot on a Cyrillic letter that has one",
    "Ꭺgent": "Cherokee",
    "ꓐꓮꓠꓗ": "Lisu",
    "🙂": "a symbol",
    "পরিকল্পক मय": "two scripts",
    "計画플래너エ": "scripts that aren't written together",
    "\u06f1planner": "a digit of another script",
    "": "empty",
    "n" * 129: "too long",
}


@pytest.mark.parametrize("name", GOOD)
def test_names_in_many_scripts_are_good(name: str) -> None:
    name = unicodedata.normalize("NFKC", name)
    assert check_new_name(name) == name


@pytest.mark.parametrize("name", BAD, ids=list(BAD.values()))
def test_a_name_that_could_mislead_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_new_name(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("ｐlanner ", r"the normal form 'planner': NFKC, without outer or double blanks, got '\uff50lanner '"),
        ("cafe\u0301", r"the normal form 'café': NFKC, without outer or double blanks, got 'cafe\u0301'"),
        (
            "na\u00efve\u2011x",
            r"letters and digits of common alphabets and ASCII signs, not U+2011, got 'na\xefve\u2011x'",
        ),
        (" \u0441\u043e", r"a name that can't pass for a Latin one, as these Cyrillic letters do, got ' \u0441\u043e'"),
        ("  ", "the normal form NFKC, without outer or double blanks, got '  '"),
        ("\ufdfa" * 9, "the normal form NFKC, without outer or double blanks, got " + ascii("\ufdfa" * 9)),
        ("pl\u0430nner", r"letters of one script, not of Cyrillic and Latin together, got 'pl\u0430nner'"),
        (
            "\u0441\u043e\u0441\u043e\u0430",
            "a name that can't pass for a Latin one, as these Cyrillic letters do, got " + ascii("сосоа"),
        ),
        ("pl\u0251n", r"letters and digits of common alphabets and ASCII signs, not U+0251, got 'pl\u0251n'"),
        ("a\u3164", r"no invisible characters, got 'a\u3164'"),
        ("-", "another name, since this one stands for a missing account in paths, got '-'"),
        ("\u0301a", r"at most 2 marks on each letter, got '\u0301a'"),
    ],
)
def test_a_refusal_says_what_to_do(name: str, detail: str) -> None:
    with hub_server() as hub, hub.http() as stranger, hub.http(ADMIN) as admin:
        for caller, path in ((stranger, "/api/onboard/register"), (admin, "/api/admin/agents")):
            answer = caller.post(path, json={"agent_id": name})
            expected = {"error": "bad_agent", "detail": f"agent: expected {detail}"}
            assert (answer.status_code, answer.json()) == (400, expected)


@given(st.text(min_size=1, max_size=12))
def test_a_normal_form_is_only_offered_if_it_would_be_accepted(name: str) -> None:
    try:
        check_new_name(name)
    except InvalidInput as error:
        offered = re.search("expected the normal form ('.*'|\".*\"): NFKC", str(error))
        if offered is not None:
            assert check_new_name(literal_eval(offered[1])) != name


@given(st.text(min_size=1, max_size=12))
def test_a_good_name_is_normal_and_any_other_is_refused_without_a_crash(name: str) -> None:
    try:
        good = check_new_name(name)
    except InvalidInput:
        return
    assert good == name == unicodedata.normalize("NFKC", name) == name.strip()
    assert name.isprintable()


@pytest.mark.parametrize("name", ["pl\u0430nner", " planner ", "🙂"])
async def test_an_agent_that_was_registered_before_keeps_its_name(name: str, tmp_path: Path) -> None:
    database = Database(tmp_path / "hub.db")
    agents = DatabaseAgents(database)
    await agents.add(name, digest_of("its token"), 0.0, None)
    registry = Registry(agents, Gate())
    assert await registry.verify(name, "its token")
    token = await registry.rotate(name)
    assert await registry.owner(token) == name
    assert [one.agent for one in await registry.agents()] == [name]
    database.close()
