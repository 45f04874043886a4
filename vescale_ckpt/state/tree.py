"""The state tree: containers, plain values and places of tensors, as nodes that a manifest can hold.

Paths are tuples of keys and never joined strings: ``{"a.b": 1}`` and ``{"a": {"b": 1}}`` are different. Two nodes are
equal only if they are the same to the last bit: ``1``, ``True`` and ``1.0`` differ, and so do ``0.0`` and ``-0.0``.
Pure: this module knows neither torch nor numpy; plain values of those libraries are wrapped by ``state.values``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from vescale_ckpt.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator

Key: TypeAlias = str | int
Path: TypeAlias = tuple[Key, ...]

MAX_DEPTH: Final = 64
"""Keys that a path may have. So a container at a path of that many is refused, at save, at merge and at decode."""


class DictKind(enum.StrEnum):
    """Which class of dict the user had, as far as loading makes it again."""

    DICT = "dict"
    ORDERED = "ordered"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class Foreign:
    """A plain value of another library as text, so that a tree is read where that library lacks it."""

    kind: str
    """``library.type``: ``torch.dtype``, ``numpy.float32``, ..."""
    text: str


@dataclass(frozen=True, slots=True)
class DictNode:
    """A dict; the order of its keys is kept."""

    items: tuple[tuple[Key, Node], ...]
    union: bool = False
    """Ranks may hold different keys and the checkpoint holds all of them (parameters of a module, state of an
    optimizer under pipeline parallelism). Where false, ranks that disagree on the keys are an error."""
    kind: DictKind = DictKind.DICT


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


@dataclass(frozen=True, slots=True, eq=False)
class ValueNode:
    """A plain value: None, bool, int, float, complex, str, bytes, or a ``Foreign`` that ``state.values`` made."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not ValueNode:
            return NotImplemented
        return same_value(self.value, other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), _bits(self.value)))


@dataclass(frozen=True, slots=True)
class PerRankNode:
    """A value of which every rank has its own; a tensor below has the path ``(*path, rank, ...)``."""

    items: tuple[tuple[int, Node], ...]
    """(rank, subtree), by rank. While a save is under way a rank's tree holds its own entry only."""


Node: TypeAlias = DictNode | ListNode | TupleNode | TensorNode | ValueNode | PerRankNode


def same_value(a: Any, b: Any) -> bool:
    """Return whether two plain values have the same type and the same bits."""
    return a is b or (a.__class__ is b.__class__ and bool(_bits(a) == _bits(b)))


def _bits(value: Any) -> Any:
    """Return what tells apart values of one class: a NaN equals itself and -0.0 does not equal 0.0."""
    if value.__class__ is float:
        return struct.pack("<d", value)
    if value.__class__ is complex:
        return struct.pack("<dd", value.real, value.imag)
    return value


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
    stack: list[tuple[Path, Node]] = [(path, node)]
    while stack:
        path, node = stack.pop()
        yield path, node
        if node.__class__ is not TensorNode and node.__class__ is not ValueNode:
            below = [((*path, key), child) for key, child in children(node)]
            below.reverse()
            stack += below


def tensor_paths(node: Node) -> list[Path]:
    """Return the paths of all places of tensors, in order; several times as fast as ``walk``."""
    found: list[Path] = []
    stack: list[tuple[Path, Node]] = [((), node)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, TensorNode):
            found.append(path)
        elif not isinstance(node, ValueNode):
            items = enumerate(node.items) if isinstance(node, ListNode | TupleNode) else node.items
            below = [((*path, key), child) for key, child in items if child.__class__ is not ValueNode]
            below.reverse()
            stack += below
    return found


def get(node: Node, path: Path) -> Node:
    """Return the node at a path.

    Raises:
        NotFoundError: nothing is there; the message names the last node that is.
    """
    for depth, key in enumerate(path):
        for name, child in children(node):
            if name == key and name.__class__ is key.__class__:
                node = child
                break
        else:
            raise NotFoundError(
                f"cannot find {path!r} in the state tree: {fqn(path[:depth])!r} is {describe(node)} without {key!r}",
                fqn=fqn(path),
            )
    return node


def describe(node: Node) -> str:
    """Return what a node is, in a few words for a message."""
    match node:
        case DictNode() | ListNode() | TupleNode():
            name = {DictNode: "dict", ListNode: "list", TupleNode: "tuple"}[type(node)]
            unit = (" key" if len(node.items) == 1 else " keys") if isinstance(node, DictNode) else ""
            return f"a {name} of {len(node.items)}{unit}"
        case PerRankNode():
            return "a value per rank"
        case TensorNode():
            return "a tensor"
        case ValueNode():
            return f"the value {shorten(node.value)}"


def shorten(value: Any, limit: int = 60) -> str:
    """Return a plain value as a message shows it, never longer than about ``limit`` characters."""
    if isinstance(value, Foreign):
        return f"{value.kind} {shorten(value.text, limit)}"
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        head = abs(value) >> (value.bit_length() - 64)  # decimal digits of huge ints cost quadratic time
        return f"{'-' if value < 0 else ''}0x{head:x}... (int of {value.bit_length()} bits)"
    if isinstance(value, str | bytes) and len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        return f"{value[: limit - 20]!r}... ({len(value)} {unit})"
    if isinstance(value, float) and value != value:  # noqa: PLR0124 - NaN; its payload tells two of them apart
        return f"nan({struct.pack('>d', value).hex()})"
    return repr(value)


def fqn(path: Path) -> str:
    """Return the dotted name of a path, for people; two paths may share it."""
    return ".".join(str(key) for key in path)
