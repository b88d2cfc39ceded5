"""Rows of the change log that somebody else has written: only what can't be read of them has no effect."""

import json
from typing import Any

import pytest

from headgate.stores.base import UNREADABLE, Change, Edit
from headgate.stores.change_rows import to_changes, to_rows

pytestmark = pytest.mark.once

HUGE = 10**400  # JSON has it, and no float does


def read(**fields: Any) -> Change:
    row = {"kind": "exemption", "agent": "a", "value": "exempt", "by": "me", "at": 5.0, **fields}
    (change,) = to_changes([json.loads(json.dumps(row))])
    return change


@pytest.mark.parametrize(
    "at", [HUGE, -HUGE, 1e300, -1.0, float("inf"), float("nan"), True, "5", None], ids=lambda one: f"{one!s:.9}"
)
def test_an_unreadable_time_is_0_and_the_change_counts(at: object) -> None:
    change = read(at=at)
    assert change == Change((Edit("exemption", "a", value="exempt"),), "me", 0.0)
    assert type(to_rows(change)[0]["at"]) is float


@pytest.mark.parametrize("generation", [HUGE, -1, 2**63, "1", 1.5], ids=lambda one: f"{one!s:.9}")
def test_a_row_with_a_generation_that_no_store_has_is_unreadable(generation: object) -> None:
    assert [edit.kind for edit in read(generation=generation).edits] == [UNREADABLE]


@pytest.mark.parametrize(
    "until", [HUGE, -HUGE, 1e300, -1, float("inf"), float("nan"), True, "5"], ids=lambda one: f"{one!s:.9}"
)
def test_a_block_until_no_time_is_unreadable(until: object) -> None:
    change = read(kind="block", value=json.dumps({"until": until, "reason": ""}))
    assert [edit.kind for edit in change.edits] == [UNREADABLE]
