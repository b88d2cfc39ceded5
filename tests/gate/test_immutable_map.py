"""The immutable map: like a dict that is copied for every update, and shares what an update leaves alone."""

from hypothesis import given
from hypothesis import strategies as st

from headgate.gate.immutable_map import ImmutableMap

keys = st.integers(0, 30).map(str) | st.integers(0, 1200).map(str)
updates = st.dictionaries(keys, st.none() | st.integers(1, 9), max_size=20)


def of(items: dict[str, int]) -> ImmutableMap[int]:
    empty: ImmutableMap[int] = ImmutableMap()
    return empty.update({**items})


@given(st.sampled_from([0, 10, 1020, 1100]), st.lists(updates, max_size=4))
def test_it_equals_a_dict_that_is_copied_for_every_update(size: int, course: list[dict[str, int | None]]) -> None:
    expected = {str(number): 0 for number in range(1, size)}
    found = of(expected)
    seen = []
    for update in course:
        expected = {key: value for key, value in (expected | update).items() if value is not None}
        found = found.update(update)
        seen.append((found, expected))
    for one, same in seen:  # at the end: no update has touched the maps before it
        assert dict(one.items()) == same
        assert len(one) == len(one.items()) == len(same)
        assert all(one.get(key) == same.get(key) for key in [*same, "another"])
        assert one == of(same)


def test_an_update_copies_little() -> None:
    class Value:
        pass

    before: ImmutableMap[Value] = ImmutableMap()
    before = before.update({str(number): Value() for number in range(20_000)})
    after = before.update({"7": Value()})
    different = [key for key, value in after.items() if before.get(key) is not value]
    assert different == ["7"]
    assert before.update({}) is before


def test_a_map_of_many_keys_is_a_tree_of_small_leaves() -> None:
    """So that an update is quick, however the keys came in."""
    one_by_one: ImmutableMap[int] = ImmutableMap()
    for number in range(3000):
        one_by_one = one_by_one.update({str(number): number})
    for built in (one_by_one, of({str(number): number for number in range(50_000)})):
        assert max(leaf_sizes(built._root)) <= 1024


def leaf_sizes(node: object) -> list[int]:
    if isinstance(node, list):
        return [size for child in node for size in leaf_sizes(child)]
    assert isinstance(node, dict)
    return [len(node)]
