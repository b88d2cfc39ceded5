"""docs/dashboard.md lists every field that is sent, and no other."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headgate.hub.api.agent_detail_routes import AgentDetail, AgentHold, AgentSocket, AgentTasks, Bucket
from headgate.hub.dashboard import accounts, feed, updates
from headgate.hub.dashboard.accounts import AccountCard, LimitCard
from headgate.hub.dashboard.cards import AgentCard, BucketUsage, Summary, TaskCounts
from headgate.hub.dashboard.feed import WatchRequest
from headgate.hub.dashboard.updates import LiveCard, Snapshot, Update
from headgate.hub.monitoring.address_log import DeniedAddress
from headgate.hub.monitoring.denials import DenialRecord, DeniedAction
from headgate.hub.monitoring.stats import AGENT_SLOTS, FLEET_SLOTS, SLOT, Offender
from headgate.hub.settings import HubSettings

PAGE = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text(encoding="utf-8")


def words(cell: str) -> set[str]:
    """What stands in a cell as code."""
    return set(re.findall(r"`(\w+)`", cell))


def rows(header: str) -> dict[str, str]:
    """The rows of a table by the words of their first cell."""
    lines = PAGE.split(f"\n{header}\n", 1)[1].splitlines()[1:]
    table = lines[: next(number for number, line in enumerate(lines) if not line.startswith("|"))]
    found = [line.strip("|").partition("|") for line in table]
    return {word: rest for first, _, rest in found for word in words(first)}


def named(kind: Any) -> set[str]:
    return {field.encode_name for field in msgspec.structs.fields(kind)}


IN_FRAMES = rows("| in a frame | `snapshot` | `update` | |")
OF_CARDS = rows("| of a card | |")
OF_SUMMARY = rows("| of the summary | |")
OF_AN_AGENT = rows("| field | |")


def test_b7_every_field_of_a_frame_is_in_the_docs() -> None:
    assert set(IN_FRAMES) == named(Snapshot) | named(Update)
    for kind, column in ((Snapshot, 0), (Update, 1)):
        assert {name for name, rest in IN_FRAMES.items() if rest.split("|")[column].strip()} == named(kind)
    assert all(f"`{name}`?" in rows("| frame | from | |")["watch"] for name in named(WatchRequest))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (LiveCard, set(OF_CARDS)),
        (Summary, set(OF_SUMMARY)),
        (BucketUsage, words(OF_CARDS["usage"])),
        (Offender, words(OF_SUMMARY["worst_offenders"])),
        (TaskCounts, words(OF_SUMMARY["tasks"])),
        (DeniedAddress, words(OF_SUMMARY["denied_addresses"])),
        (AgentDetail, set(OF_AN_AGENT) | named(AgentCard)),
        (AgentHold, words(OF_AN_AGENT["holds"]) - {"open", "expired"}),
        (AccountCard, set(rows("| of an account | |"))),
        (LimitCard, set(rows("| of a limit | |"))),
        (Bucket, words(OF_AN_AGENT["buckets"])),
        (DenialRecord, words(OF_AN_AGENT["denials"])),
        (AgentSocket, words(OF_AN_AGENT["connections"]) - {"ws", "relay"}),
        (AgentTasks, words(OF_AN_AGENT["tasks"])),
        (DeniedAction, words(OF_AN_AGENT["denied_actions"].split(". ")[0])),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_b7_every_nested_field_is_in_the_docs(kind: Any, told: set[str]) -> None:
    assert told == named(kind)


def test_b7_the_numbers_in_the_docs_are_those_of_the_hub() -> None:
    for name, number in (("slot_seconds", SLOT), ("agent_slots", AGENT_SLOTS), ("fleet_slots", FLEET_SLOTS)):
        assert IN_FRAMES[name].rstrip("| ").endswith(f": {number}")
    limits = PAGE.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert f"| {HubSettings().max_dashboards}: `--max-dashboards`" in limits
    assert f"| cards | {updates.MAX_CARDS:,}," in limits
    assert f"| accounts | {accounts.MAX_ACCOUNTS}," in limits
    assert f"| limits of an account | {accounts.MAX_LIMITS}," in limits
    assert f"| accounts that are read | {accounts.MAX_READ} each second" in limits
    assert f"| {feed.MAX_QUEUED} frames wait" in limits
    assert f"wait, of {feed.MAX_QUEUED_BYTES >> 20} MiB" in limits
    assert f"| cards in a frame | {updates._FRAME_CARDS}." in limits
    assert f"one frame of {feed._MAX_FRAME:,} bytes" in limits
