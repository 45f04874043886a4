"""The state tree: containers, plain values and places of tensors, as nodes that a manifest can hold.

Paths are tuples of keys and never joined strings: ``{"a.b": 1}`` and ``{"a": {"b": 1}}`` are different. Pure: this
module knows neither torch nor numpy; plain values of those libraries are wrapped by ``state.values``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

Key: TypeAlias = str | int
Path: TypeAlias = tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class DictNode:
    """A dict; the order of its keys is kept."""

    items: tuple[tuple[Key, Node], ...]
    union: bool = False
    """Ranks may hold different keys and the checkpoint holds all of them (parameters of a module, state of an
    optimizer under pipeline parallelism). Where false, ranks that disagree on the keys are an error."""


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TupleNode:
    """A tuple."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TensorNode:
    """The place of an array; the tensor table has its record under the same path."""


@dataclass(frozen=True, slots=True)
class ValueNode:
    """A plain value: None, bool, int, float, complex, str, bytes, or what ``state.values`` encodes (dtype, size, ...)."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerRankNode:
    """A value of which every rank has its own; a tensor below has the path ``(*path, rank, ...)``."""

    items: tuple[tuple[int, Node], ...]
    """(rank, subtree), by rank. While a save is under way a rank's tree holds its own entry only."""


Node: TypeAlias = DictNode | ListNode | TupleNode | TensorNode | ValueNode | PerRankNode


def children(node: Node) -> Iterator[tuple[Key, Node]]:
    """Yield (key, child) of a container; nothing for a leaf."""
    match node:
        case DictNode() | PerRankNode():
            yield from node.items
        case ListNode() | TupleNode():
            yield from enumerate(node.items)
        case TensorNode() | ValueNode():
            return


def walk(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of every node in order, parents first."""
    yield path, node
    for key, child in children(node):
        yield from walk(child, (*path, key))


def fqn(path: Path) -> str:
    """Return the dotted name of a path, for people; two paths may share it."""
    return ".".join(str(key) for key in path)
