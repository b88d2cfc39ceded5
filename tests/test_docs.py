"""The docs name everything that users can use."""

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]

import headgate
from benchmarks.run import SUBJECTS, write
from headgate import Decision, Gate, Hold, Limiter, Policy, RedisStore, client
from headgate.cli import build_parser
from headgate.client import AsyncObeyingTransport, HubClient, RelayClient
from headgate.client.hub import HubClientOptions
from headgate.edges.decorator import rate_limited
from headgate.edges.guard import Options
from headgate.edges.websocket import WebSocketLimits
from headgate.events import Event
from headgate.http import Dialect
from headgate.hub.api.routes import ROUTES
from headgate.hub.api.routing import Access, Route
from headgate.hub.settings import HubSettings, flag, variable
from headgate.hub.sockets import frames
from headgate.limits.violations import Standing
from headgate.proto import envelope_pb2 as wire
from headgate.sliding import RateLimiter, RateLimitResult
from headgate.stores.holds import AccountStore
from tests.support.cli import leaf_commands
from tests.support.command_steps import ELSEWHERE, STEPS, routes_of_commands

pytestmark = pytest.mark.once

DOCS = Path(__file__).parent.parent / "docs"
PACKAGE = Path(headgate.__file__).parent


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


LIMITER = page("limiter")
HOLDS = page("holds")
ACCOUNTS = page("accounts")
GATE = page("gate")
REDIS = page("redis")
HUB = page("hub-reference")
RELAY = page("relay")
BENCHMARKS = page("benchmarks")
EXAMPLE = (DOCS / "headgate.toml").read_text(encoding="utf-8")


def public(thing: type) -> list[str]:
    """Public names, without the async twin of another."""
    names = [name for name in dir(thing) if not name.startswith("_")]
    return [name for name in names if not (name.startswith("a") and name[1:] in names)]


def missing(names: list[str], text: str) -> list[str]:
    """Those that stand nowhere as code: `name`, .name, name( or name=."""
    return [name for name in names if not re.search(rf"[`.\"]{name}\b|\b{name}[(=]", text)]


def parameters(thing: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(thing).parameters)


INSIDE = (
    "agents",
    "alerts",
    "areset",
    "execute",
    "aexecute",
    "change_log",
    "decide_without",
    "keys",
    "local_cache",
    "reset",
    "traffic",
    "windows",
)
FOR_STORES = (
    "after",
    "as_degraded",
    "as_denied",
    "as_shadow",
    "at",
    "bucket_retry_ms",
    "own_wait",
    "retry_ms",
    "retry_us",
    "smallest_left",
    "with_violation",
)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (public(Limiter), LIMITER + HOLDS),
        ([name for name in public(Hold) if name != "parts" and not name.startswith("renew")], HOLDS),
        ([name for name in public(Decision) if name not in FOR_STORES], LIMITER + GATE),
        (public(Gate), GATE + ACCOUNTS),
        (public(Standing), GATE),
        ([name for name in public(RedisStore) if name not in (*dir(AccountStore), "renew", *INSIDE)], REDIS),
        ([*inspect.signature(RedisStore).parameters][1:], REDIS),
        (public(RateLimiter) + list(RateLimitResult.__slots__), REDIS),
        ([event.__name__ for event in get_args(Event)], GATE + ACCOUNTS),
        ([name for name in headgate.__all__ if name not in ("Limit", "Outcome")], LIMITER + GATE + HOLDS),
        ([*Options.__annotations__, *get_args(Dialect)], page("middleware")),
        ([field.name for field in fields(WebSocketLimits)], page("websockets")),
        (parameters(rate_limited)[1:-1], page("frameworks")),  # without those that stand for others
        ([name for name in client.__all__ if name not in client._PLACES["http"]], page("clients")),
        ([*HubClientOptions.__annotations__], page("clients")),
        ([name for name in public(HubClient) + public(RelayClient) if name != "path"], page("clients")),
        ([name for name in client.__all__ if name in client._PLACES["http"]], page("clients-http")),
        (parameters(AsyncObeyingTransport), page("clients-http")),
    ],
    ids=["Limiter", "Hold", "Decision", "Gate", "Standing", "RedisStore", "options", "RateLimiter", "events",
         "headgate", "middleware", "websocket", "decorator", "client", "clients", "verbs", "transports", "transport"],
)  # fmt: skip
def test_every_public_name_is_in_the_docs(names: list[str], text: str) -> None:
    assert missing(names, text) == []


def test_every_setting_is_in_the_annotated_example() -> None:
    def keys(table: dict[str, Any]) -> list[str]:
        found = []
        for key, value in table.items():
            found += [key, *(keys(value) if isinstance(value, dict) else [])]
        return found

    assert [key for key in keys(Policy().settings()) if key not in EXAMPLE] == []


# The hub -------------------------------------------------------------------------------------------------------------

SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in Path(frames.__file__).parents[1].rglob("*.py"))


FROM_AGENTS = "| from agents | fields | tier | reply |"
FROM_THE_HUB = "| from the hub | fields | sent |"
OTHER_ROUTES = "| route | for | counted as | parameters and response |"
ADMIN_ROUTES = "| admin route | parameters and response |"
SETTINGS = "| option | variable | default | |"


def rows(header: str, text: str = HUB) -> list[list[str]]:
    """The cells of the table below a header row."""
    lines = text.split(f"\n{header}\n", 1)[1].splitlines()[1:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def words(cell: str) -> list[str]:
    """What stands in a cell as code."""
    return re.findall(r"`([^`]+)`", cell)


def about(word: str, table: list[list[str]]) -> str:
    """The rest of the one row that a word stands first in."""
    found = [" | ".join(row[1:]) for row in table if word in words(row[0])]
    assert len(found) == 1, f"{word}: expected one row in the docs, got {len(found)}"
    return found[0]


def named(kind: Any) -> list[str]:
    """The fields of a frame, a body or a query as they are called on the wire."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


@pytest.mark.parametrize("kind", frames.CLIENT_FRAMES, ids=frames.tag_of)
def test_every_frame_of_agents_is_in_the_docs(kind: Any) -> None:
    tag = frames.tag_of(kind)
    row = about(tag, rows(FROM_AGENTS))
    assert [name for name in named(kind) if name != "id" and f"`{name}`" not in row] == []
    optional = [field.encode_name for field in msgspec.structs.fields(kind) if not field.required]
    assert [name for name in optional if name != "id" and f"`{name}`?" not in row] == []
    tier = "the session's own" if tag == "session_signal" else Policy().tier_of("ws", tag)
    assert row.split(" | ")[1] == tier


def test_every_field_of_a_signal_is_in_the_docs() -> None:
    row = about("session_signal", rows(FROM_AGENTS))
    assert [name for name in named(frames.Signal) if f"`{name}`" not in row] == []


@pytest.mark.parametrize("kind", frames.SERVER_FRAMES, ids=frames.tag_of)
def test_every_frame_of_the_hub_is_in_the_docs(kind: Any) -> None:
    row = about(frames.tag_of(kind), rows(FROM_THE_HUB))
    parts = {"channels": named(frames.ChannelInfo), "messages": named(frames.Post)}
    wanted = [part for name in named(kind) if name != "id" for part in (name, *parts.get(name, []))]
    assert [name for name in wanted if f"`{name}`" not in row] == []


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_is_in_the_docs(route: Route) -> None:
    table = rows(ADMIN_ROUTES if route.access is Access.ADMIN else OTHER_ROUTES)
    row = about(f"{route.method} {route.path}", table)
    if route.access is not Access.ADMIN:
        assert row.split(" | ")[0] == route.access.value
    if route.access not in (Access.ADMIN, Access.PROBE):
        assert row.split(" | ")[1] == f"`{route.action}`, {Policy().tier_of('http', route.action)}"
    assert [name for name in named(route.query) if f"{name}=" not in row] == []
    body = named(route.body) if hasattr(route.body, "__struct_fields__") else []
    assert [name for name in body if f"`{name}`" not in row] == []


def test_every_route_of_the_admin_api_has_a_command_with_a_test_in_a_process() -> None:
    listed, commands = routes_of_commands(DOCS / "cli.md"), {name for name, _ in leaf_commands(build_parser())}
    assert set(listed) == commands
    used, existing = set().union(*listed.values()), {f"{one.method} {one.path}" for one in ROUTES}
    assert used - existing == set()
    below = [one for one in ROUTES if one.access is Access.ADMIN or one.path.startswith("/api/admin/")]
    assert {f"{one.method} {one.path}" for one in below} - used == set()
    assert {step.command for step in STEPS} | set(ELSEWHERE) == commands
    assert all((DOCS.parent / test).is_file() for test in ELSEWHERE.values())


def test_what_the_admin_routes_are_counted_as_is_in_the_docs() -> None:
    actions = {route.action for route in ROUTES if route.access is Access.ADMIN} | {"unknown_route"}
    assert [one for one in actions if f"`{one}`, {Policy().tier_of('http', one)}" not in HUB.replace("\n", " ")] == []


def test_the_docs_have_no_route_frame_or_setting_that_does_not_exist() -> None:
    listed = rows(OTHER_ROUTES) + rows(ADMIN_ROUTES)
    assert {word for row in listed for word in words(row[0])} == {f"{one.method} {one.path}" for one in ROUTES}
    said = {word for row in rows(FROM_AGENTS) for word in words(row[0])}
    assert said == set(frames.TYPES)
    told = {word for row in rows(FROM_THE_HUB) for word in words(row[0])}
    assert told == {frames.tag_of(kind) for kind in frames.SERVER_FRAMES}
    variables = {word for row in rows(SETTINGS) for word in words(row[1])}
    assert variables == {variable(one.name) for one in fields(HubSettings)} | {"HEADGATE_CONFIG"}


@pytest.mark.parametrize("setting", fields(HubSettings), ids=lambda setting: setting.name)
def test_every_setting_of_the_hub_is_in_the_docs(setting: Any) -> None:
    (row,) = [row for row in rows(SETTINGS) if words(row[1]) == [variable(setting.name)]]
    assert words(row[0]) == ([] if setting.metadata["secret"] else [flag(setting.name)])
    assert setting.default is not MISSING
    shown = f"{setting.default:g}" if isinstance(setting.default, float) else str(setting.default)
    shown = shown.lower() if isinstance(setting.default, bool) else shown
    nothing = "made" if setting.name == "admin_token" else "none"
    assert row[2] == (shown if setting.default or setting.default == 0 else nothing)
    annotated = EXAMPLE.partition("\n[hub]\n")[2]
    assert re.search(rf"^(# )?{setting.name} = ", annotated, re.MULTILINE)


def test_the_annotated_example_has_the_defaults_of_the_hub() -> None:
    assert HubSettings.load({}, {}, config=DOCS / "headgate.toml") == HubSettings()


REFUSED = re.findall(r'RequestError\(\s*(\d{3}),\s*"(\w+)"', SOURCE)
OTHERS = re.findall(r'(?:Problem\(\s*error=|_error\(|refuse_invalid\([^,]+,|\bcode(?:: str)? ?=)\s*"(\w+)"', SOURCE)


def test_every_error_is_in_the_docs() -> None:
    table = rows("| `error` | status | meaning |")
    where = {word: about(word, table).split(" | ")[0] for _, word in REFUSED}
    assert [(status, word) for status, word in REFUSED if where[word] != "`/ws`" and status not in where[word]] == []
    assert [word for word in OTHERS if not about(word, table)] == []
    listed = {word for row in table for word in words(row[0])}
    assert listed == {word for _, word in REFUSED} | set(OTHERS)
    assert {"invalid", "busy", "not_identified", "rate_limited", "too_large", "session_closed", "exists"} <= listed


def test_every_error_of_the_relay_is_on_its_page() -> None:
    source = Path(frames.__file__).with_name("relay.py").read_text(encoding="utf-8")
    said = re.findall(r'(?:_error\(|\bcode(?:: str)? ?=)\s*"(\w+)"', source)
    assert {"unauthorized", "unreachable", "invalid", "too_large"} <= set(said)
    assert {word for row in rows("| `code` | |", RELAY) for word in words(row[0])} == set(said)


def test_every_close_code_is_in_the_docs() -> None:
    used = set(re.findall(r"(?<![\d_.])10(?:0[1-9]|1[0-5])(?![\d_.])", SOURCE))
    assert {"1008", "1012"} <= used
    by_the_library = {"1002", "1007", "1009"}
    assert {row[0] for row in rows("| code | cause | remedy |")} == used | by_the_library


def test_the_whole_schema_of_the_relay_is_on_its_page() -> None:
    envelope = wire.DESCRIPTOR.message_types_by_name["Envelope"]
    numbers = {field.name: field.number for field in envelope.fields} | dict(wire.MessageType.items())
    assert [name for name, number in numbers.items() if number and f"`{name}` = {number}" not in RELAY] == []
    inner = [part.name for field in envelope.fields if field.message_type for part in field.message_type.fields]
    assert missing(inner, RELAY) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "clients/typescript/README.md"])
def test_links_from_outside_the_docs_lead_somewhere(name: str) -> None:
    """./dev docs checks the links within the docs."""
    page = DOCS.parent / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            titles = re.findall(r"^#+ (.*)", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    same_idea = {"RateLimitMiddleware", "_WatchedResponse", "_Follower"}
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in same_idea} == {}


def test_docstrings_name_their_subject() -> None:
    vague = {"What", "Who", "Whoever", "Those"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value.strip()
                if text.partition(" ")[0] in vague:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {text.splitlines()[0]}")
    assert found == []


def test_the_glossary_has_at_most_25_words() -> None:
    glossary = (DOCS / "README.md").read_text(encoding="utf-8").partition("## Glossary")[2].partition("## ")[0]
    words = re.findall(r"^\| ([a-z ]+?) \|", glossary, re.MULTILINE)[1:]  # without the heading
    assert len(words) == len(set(words)) <= 25
    assert words == sorted(words)


def test_the_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    compared = re.findall(r"^\| .+ \| \*\*(.+)\*\*(.*) \|$", readme, re.MULTILINE)
    assert len(compared) == 6
    measured = set(re.findall(r"\| (\d[\d,.]*)(?= )", BENCHMARKS))
    figures = [figure for _, times in compared for figure in re.findall(r"\d[\d,.]*", times)]
    assert set(figures) <= measured, "the table in the README is written by hand"


def test_a_report_replaces_its_section_of_the_benchmarks(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text(BENCHMARKS, encoding="utf-8")
    for subject in SUBJECTS:
        write(subject, f"a report on {subject}\n", page)
    text = page.read_text(encoding="utf-8")
    for subject in SUBJECTS:
        assert f"<!-- {subject} benchmark -->\n\na report on {subject}\n\n<!-- end of {subject} benchmark -->" in text
    assert re.findall("^## .*", text, re.MULTILINE) == re.findall("^## .*", BENCHMARKS, re.MULTILINE)
    with pytest.raises(ValueError, match="has no place for the report"):
        write("nothing", "", page)


def test_the_examples_of_the_deployment_page_are_well_formed() -> None:
    text = page("deployment")
    compose, stateful_set = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    assert compose["services"]["hub"]["volumes"] == ["hub-data:/data"]
    (container,) = stateful_set["spec"]["template"]["spec"]["containers"]
    probes = [container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")]
    assert {f"GET {path}" for path in probes} <= {f"{route.method} {route.path}" for route in ROUTES}


def test_the_deployment_page_names_settings_that_exist() -> None:
    text = page("deployment")
    names = [setting.name for setting in fields(HubSettings)] + ["config"]
    used = re.findall(r"(?<![\w-])--[a-z][a-z-]+", text), re.findall(r"HEADGATE_[A-Z_]+", text)
    assert set(used[0]) <= set(map(flag, names))
    assert set(used[1]) <= set(map(variable, names))
    assert "--allowed-hosts" in used[0]


def tree(text: str) -> set[str]:
    """The modules that the tree in CONTRIBUTING.md names, as paths without a suffix."""
    found: set[str] = set()
    folders: list[str] = []
    for line in text.partition("\nsrc/headgate/\n")[2].partition("\ntests/")[0].splitlines():
        words = re.sub(r"\(.*\)", "", line).split()
        depth = (len(line) - len(line.lstrip())) // 2
        if words[0].endswith("/"):
            folders = [*folders[: depth - 1], words.pop(0)]
        elif depth == 1:
            folders = []
        found |= {"".join(folders) + word.removesuffix(".py") for word in words if not word.endswith("/")}
    return found


def test_the_tree_names_every_module() -> None:
    modules = [path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py")]
    existing = {module.as_posix() for module in modules if not module.name.startswith("__")}
    listed = tree((DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert (existing - listed, listed - existing) == (set(), set())


def test_the_files_that_the_map_names_exist() -> None:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = rows("| to change | open | because |", text)
    assert len(table) == 17
    assert [row[1] for row in table if not (PACKAGE / words(row[1])[0]).is_file()] == []
    others = [word for row in table for word in words(row[2]) if "/" in word and word.endswith(".py")]
    assert [word for word in others if not (PACKAGE / word).is_file()] == []
