"""Replays under policies with tiers of their own."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from headgate import InvalidInput, Policy
from headgate.replay.options import RouteRule
from tests.support.log_files import access_line, replay_report, write_csv, write_log

BULK = Policy(
    tiers=["bulk"],
    limits={"bulk": "2/minute", "normal": "1/minute"},
    actions={"http": {"post_import": "bulk"}},
    agents={"planner": {"bulk": "unlimited"}},
)
TIERS = "light, normal, heavy, bulk"


def requests_and_denials(report: Any, policy: int = 0) -> dict[str, tuple[int, int]]:
    """Requests and denials by tier."""
    return {one.tier: (one.outcomes.requests, one.outcomes.denied) for one in report.policies[policy].tiers}


def test_a_log_may_name_a_tier_of_the_policy(tmp_path: Path) -> None:
    rows = [(0, agent, tier) for agent in ("a", "planner") for tier in ("bulk", "heavy") for _ in range(3)]
    report = replay_report(write_csv(tmp_path, [*rows, (0, "a", "bluk")]), policy=BULK)
    assert requests_and_denials(report) == {"heavy": (6, 0), "bulk": (6, 1)}
    assert report.reasons == {f"tier: expected one of {TIERS}": 1}
    assert requests_and_denials(replay_report(write_csv(tmp_path, rows), policy=Policy())) == {"heavy": (6, 0)}


def test_routes_and_the_default_may_name_a_tier_of_the_policy(tmp_path: Path) -> None:
    lines = [
        access_line(more={"request": f"{method} / HTTP/1.1"}) for method in ("GET", "POST", "PUT") for _ in range(3)
    ]
    routes = tuple(map(RouteRule.parse, ("POST /=bulk", "PUT /=post_import")))
    report = replay_report(write_log(tmp_path, "\n".join(lines)), policy=BULK, routes=routes)
    assert requests_and_denials(report) == {"normal": (3, 2), "bulk": (6, 4)}
    assert report.unknown_actions == []
    assert requests_and_denials(replay_report(write_log(tmp_path, "\n".join(lines)), policy=BULK, tier="bulk")) == {
        "bulk": (9, 7)
    }


def test_a_new_tier_is_compared_by_an_action_that_it_is_assigned_to(tmp_path: Path) -> None:
    log = write_log(tmp_path, "\n".join([access_line(more={"request": "POST / HTTP/1.1"})] * 3))
    report = replay_report(log, policy=Policy(), other=BULK, routes=(RouteRule.parse("POST /=post_import"),))
    assert (requests_and_denials(report), requests_and_denials(report, 1)) == ({"normal": (3, 0)}, {"bulk": (3, 1)})
    changes = [(one.tier, *one.limits("-"), *one.denied()) for one in report.tier_changes()]
    assert changes == [("normal", "60/minute", "-", 0, 0), ("bulk", "-", "2/minute", 0, 1)]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"tier": "bluk", "policy": BULK}, f"tier: expected one of {TIERS}, got 'bluk'"),
        ({"tier": "bulk"}, "tier: expected one of light, normal, heavy, got 'bulk'"),
        ({"routes": (RouteRule.parse("GET /=bluk"),), "policy": BULK},
         "route 'GET /': expected a tier or an action of the policy for channel http, got 'bluk'"),
        ({"routes": (RouteRule.parse("GET /=bulk"),), "other": BULK},
         "route 'GET /': tier: expected one of light, normal, heavy, got 'bulk'"),
    ],
)  # fmt: skip
def test_a_tier_that_a_policy_lacks_is_refused(how: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as error:
        replay_report(write_log(tmp_path, access_line()), **how)
    assert str(error.value) == text


def test_a_limit_is_suggested_for_a_tier_of_the_policy(tmp_path: Path) -> None:
    rows = [(0, "a", "bulk")] * 5 + [(0, "planner", "bulk")] * 9 + [(0, "a", "light")] * 3
    report = replay_report(write_csv(tmp_path, rows), policy=BULK, share=Fraction(0))
    assert report.suggestions is not None
    assert [(one.tier, one.limit, one.requests) for one in report.suggestions] == [("light", 3, 3), ("bulk", 5, 5)]
    assert '\nbulk = "5/minute"  # denies 0 of 5 requests' in report.toml()
