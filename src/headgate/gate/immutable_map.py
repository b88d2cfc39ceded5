"""A map that is never changed: setting a key makes a new map, which shares nearly everything with the old one.

A tree: inner nodes are lists of 32 nodes, chosen by five bits of the key's hash at each level; leaves are dicts. A new
map copies one leaf and the nodes above it, within a few microseconds, however many keys there are.
"""

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

    def set(self, key: str, value: V) -> "ImmutableMap[V]":
        """This map with one more key, or with another value for it."""
        size = self._size if key in self else self._size + 1
        return ImmutableMap(_with(self._root, 0, key, value), size)

    def delete(self, key: str) -> "ImmutableMap[V]":
        """This map without a key."""
        return ImmutableMap(_without(self._root, 0, key), self._size - 1) if key in self else self

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

    def __repr__(self) -> str:
        return f"ImmutableMap({dict(self.items())})"


def _child(key: str, depth: i64) -> i64:
    return (i64(hash(key)) >> (depth * _BITS)) & _MASK


def _with(node: object, depth: i64, key: str, value: object) -> object:
    if isinstance(node, list):
        nodes = node.copy()
        child = _child(key, depth)
        nodes[child] = _with(node[child], depth + 1, key, value)
        return nodes
    assert isinstance(node, dict)
    leaf = node.copy()
    leaf[key] = value
    if len(leaf) <= _LEAF or depth == _DEPTH:
        return leaf
    leaves: list[dict[str, object]] = [{} for _ in range(_MASK + 1)]
    for each, of_each in leaf.items():
        leaves[_child(each, depth)][each] = of_each
    return leaves


def _without(node: object, depth: i64, key: str) -> object:
    if isinstance(node, list):
        nodes = node.copy()
        child = _child(key, depth)
        nodes[child] = _without(node[child], depth + 1, key)
        return nodes
    assert isinstance(node, dict)
    leaf = node.copy()
    del leaf[key]
    return leaf
