"""The Grafana dashboard and Prometheus rules: valid queries that cover every metric."""

import json
import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from headgate.hub.monitoring.metrics import METRICS
from tests.support.hub import hub_server
from tests.support.prometheus import DOCS, scrape

BOARD = json.loads((DOCS / "grafana" / "headgate.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((DOCS / "grafana" / "alerts.yml").read_text(encoding="utf-8"))["groups"][0]["rules"]
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
SELECTED = 'job=~"$job", instance=~"$instance"'

FUNCTIONS = {"sum", "max", "count", "rate", "increase", "histogram_quantile"}
OVER_TIME = {"rate", "increase"}
TARGET = {"job", "instance"}  # labels that Prometheus adds
TOKEN = re.compile(
    r'"(?P<text>[^"]*)"|\[(?P<range>[^]]*)\]|(?P<word>[a-zA-Z_][\w]*)|(?P<number>\d+(\.\d+)?)|(?P<mark>=~|!=|==|[<>=+*/,(){}-])|\s+'
)


@pytest.fixture(scope="module")
def series() -> dict[str, dict[str, set[str]]]:
    """The labels that each series of a hub has, with their values."""
    with hub_server() as hub:
        found: dict[str, dict[str, set[str]]] = {}
        for name, labels in scrape(hub):
            of_series = found.setdefault(name, {})
            for label, what in labels:
                of_series.setdefault(label, set()).add(what)
    return {**found, "up": {}}


def tokens(expression: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(expression):
        match = TOKEN.match(expression, place)
        assert match, f"what is this? {expression[place:]}"
        place = match.end()
        found += [(kind, text) for kind, text in match.groupdict().items() if text is not None and kind]
    return found


def mistakes(expression: str, series: dict[str, dict[str, set[str]]]) -> list[str]:
    """What is wrong with an expression in PromQL, as far as can be seen from its words."""
    found, marks, around, grouped = tokens(expression), [], [""], set()
    wrong, used, pairs = [], set(), {"(": ")", "{": "}"}
    name, seen = "", ""
    for number, (kind, text) in enumerate(found):
        after = found[number + 1][1] if number + 1 < len(found) else ""
        if kind == "mark" and text in pairs:
            marks.append(pairs[text])
            around.append(found[number - 1][1] if number else "")
        elif kind == "mark" and text in ")}":
            wrong += [] if marks and marks.pop() == text else [f"unbalanced {text}"]
            around.pop() if len(around) > 1 else None
        elif kind == "word" and around[-1] == "by":
            grouped.add(text)
        elif kind == "word" and marks[-1:] == ["}"]:
            seen = text
            known = {*series.get(name, {}), *TARGET}
            wrong += [] if text in known else [f"{name} has no label {text}"]
        elif kind == "text" and seen not in TARGET:
            known_values = series.get(name, {}).get(seen, set())
            wrong += [f"{name} has no {seen} {one}" for one in text.split("|") if one not in known_values]
        elif kind == "word" and text not in ("by", "and", "or", "unless"):
            if after == "(" or (after == "by" and text in FUNCTIONS):
                wrong += [] if text in FUNCTIONS else [f"unknown function {text}"]
            else:
                name = text
                used.add(text)
                wrong += [] if text in series else [f"there is no {text}"]
                grows = re.search(r"_(total|bucket|count|sum)$", text) is not None
                wrong += [] if grows == (around[-1] in OVER_TIME) else [f"{text}: {around[-1] or 'nothing'} around it"]
        if kind == "range":
            wrong += [] if around[-1] in OVER_TIME else ["a range that nothing takes"]
            wrong += [] if re.fullmatch(r"\d+[smhd]|\$__rate_interval|\$__range", text) else [f"no duration: {text}"]
    wrong += ["unbalanced"] if marks else []
    of_used = {label for one in used for label in series.get(one, {})}
    wrong += [f"nothing has the label {label}" for label in grouped - of_used - TARGET]
    if "histogram_quantile" in expression and "le" not in grouped:
        wrong.append("a quantile needs le")
    return wrong


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_every_panel_queries_existing_series(
    title: str, expression: str, series: dict[str, dict[str, set[str]]]
) -> None:
    assert mistakes(expression, series) == [], title
    assert expression.count(SELECTED) == len(re.findall(r"\b(?:headgate|process)_\w+", expression)), "all are selected"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_rule_queries_existing_series(rule: dict[str, Any], series: dict[str, dict[str, set[str]]]) -> None:
    assert mistakes(rule["expr"], series) == []
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert rule["annotations"]["summary"]
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= {
        "instance",
        "tier",
        "purpose",
        "level",
        "resource",
    }


@pytest.mark.parametrize(
    ("expression", "mistake"),
    [
        ("sum(rate(headgate_checks[5m]))", "there is no headgate_checks"),
        ("sum(headgate_checks_total)", "headgate_checks_total: sum around it"),
        ("headgate_violations_total", "headgate_violations_total: nothing around it"),
        ("rate(headgate_tasks[5m])", "headgate_tasks: rate around it"),
        ("sum by (agent) (rate(headgate_checks_total[5m]))", "nothing has the label agent"),
        ('headgate_tasks{state="lost"}', "headgate_tasks has no state lost"),
        ('headgate_tasks{kind="ws"}', "headgate_tasks has no label kind"),
        ("sum(headgate_tasks", "unbalanced"),
        ("sum(headgate_tasks}", "unbalanced }"),
        ("total(headgate_tasks)", "unknown function total"),
        ("rate(headgate_violations_total[often])", "no duration: often"),
        ("histogram_quantile(0.9, sum(rate(headgate_decision_seconds_bucket[5m])))", "a quantile needs le"),
    ],
)
def test_mistakes_in_a_query_are_found(expression: str, mistake: str, series: dict[str, dict[str, set[str]]]) -> None:
    assert mistake in mistakes(expression, series)


def test_the_dashboard_is_valid_and_shows_every_metric() -> None:
    asked = " ".join(expression for _, expression in QUERIES)
    assert [metric.name for metric in METRICS if metric.name not in asked] == []
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert [variable["name"] for variable in BOARD["templating"]["list"]] == ["datasource", "job", "instance"]
    for panel in PANELS:
        for place in (panel, *panel["targets"]):
            assert place["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    for about in (
        "Traffic",
        "Denials",
        "Decision time",
        "Store",
        "Batches",
        "Connections",
        "Tasks",
        "Accounts",
        "Alerts and webhooks",
    ):
        assert about in rows
