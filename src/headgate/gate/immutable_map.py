"""A map that is never changed: an update makes a new map, which shares nearly everything with the old one.

A tree: inner nodes are lists of 32 nodes, chosen by five bits of the key's hash at each level; leaves are dicts. An
update copies the leaves of its keys and the nodes above them, each once: a single key costs a few microseconds, however
many keys there are, and a new map of many keys takes time in proportion to their number.
"""

from collections.abc import Mapping
from typing import Final, Generic, TypeVar

from headgate._native import i64

_BITS: Final[i64] = 5
_MASK: Final[i64] = 31
_LEAF: Final = 1024  # keys in a leaf before it is split: up to so many, `get` is as quick as that of a dict
_DEPTH: Final[i64] = 12  # 60 bits of the hash; keys that share them stay in one leaf

V = TypeVar("V")


class ImmutableMap(Generic[V]):
    """Values by key, in no particular order."""

    def __init__(self, root: object = None, size: int = 0) -> None:
        self._root: Final[object] = {} if root is None else root
        self._size: Final = size

    def get(self, key: str) -> V | None:
        node = self._root
        if isinstance(node, list):
            place = i64(hash(key))
            while isinstance(node, list):
                node = node[place & _MASK]
                place >>= _BITS
        assert isinstance(node, dict)
        found: V | None = node.get(key)
        return found

    def update(self, changes: Mapping[str, V | None]) -> "ImmutableMap[V]":
        """This map with some keys set, and those without a value deleted."""
        if not changes:
            return self
        size = self._size
        for key, value in changes.items():
            size += (value is not None) - (key in self)
        return ImmutableMap(_updated(self._root, 0, dict(changes)), size)

    def items(self) -> list[tuple[str, V]]:
        found: list[tuple[str, V]] = []
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            if isinstance(node, list):
                nodes.extend(node)
            elif isinstance(node, dict):
                found.extend(node.items())
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ImmutableMap) and dict(self.items()) == dict(other.items())

    def __hash__(self) -> int:
        return self._size

    def __reduce__(self) -> tuple[object, ...]:
        return _of_items, (self.items(),)  # not the tree: in another process, strings have other hashes

    def __repr__(self) -> str:
        return f"ImmutableMap({dict(self.items())})"


def _of_items(items: list[tuple[str, V]]) -> ImmutableMap[V]:
    found: ImmutableMap[V] = ImmutableMap()
    return found.update({key: value for key, value in items})  # noqa: C416 - a dict of the items would have another type


def _updated(node: object, depth: i64, changes: dict[str, object]) -> object:
    if isinstance(node, list):
        nodes = node.copy()
        for child, of_child in enumerate(_by_child(changes, depth)):
            if of_child:
                nodes[child] = _updated(node[child], depth + 1, of_child)
        return nodes
    assert isinstance(node, dict)
    leaf = node.copy()
    for key, value in changes.items():
        if value is None:
            leaf.pop(key, None)
        else:
            leaf[key] = value
    return _split(leaf, depth)


def _split(leaf: dict[str, object], depth: i64) -> object:
    """A leaf, or the node of several if it has too many keys."""
    if len(leaf) <= _LEAF or depth == _DEPTH:
        return leaf
    return [_split(part, depth + 1) for part in _by_child(leaf, depth)]


def _by_child(values: dict[str, object], depth: i64) -> list[dict[str, object]]:
    parts: list[dict[str, object]] = [{} for _ in range(_MASK + 1)]
    for key, value in values.items():
        parts[(i64(hash(key)) >> (depth * _BITS)) & _MASK][key] = value
    return parts
