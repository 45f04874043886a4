"""Two checkpoints compared: their structure by names, their values block by block, without either in memory whole."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vescale_ckpt.compare.blocks import BLOCK_BYTES, blocks
from vescale_ckpt.compare.difference import Difference, is_comparable
from vescale_ckpt.state.tree import same_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vescale_ckpt.compare.sides import Described, Side


class Verdict(enum.StrEnum):
    """What comparing two tensors, or two plain values, came to."""

    SAME = "same"
    """The same dtype, shape and bytes."""
    EQUAL = "equal"
    """Equal values of another dtype or of other bits."""
    DIFFERENT = "different"
    """Other values."""
    SHAPE = "shape"
    """Other shapes: values were not compared."""
    ONLY_A = "only in A"
    ONLY_B = "only in B"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One name in two checkpoints."""

    name: str
    verdict: Verdict
    a: Described | None
    b: Described | None
    difference: Difference | None
    """None where values were not compared: only one side has it, the shapes differ, or digests told enough."""


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """A plain value that is not the same on both sides."""

    name: str
    verdict: Verdict
    a: Any
    b: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two checkpoints side by side."""

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    """In A's order, then what only B has."""
    values: tuple[ValueDiff, ...]
    """Those that are not the same."""
    num_values: int
    """Names of plain values on either side."""
    bytes_read: int
    """Of values, both sides together."""

    @property
    def are_same(self) -> bool:
        """Whether names, shapes, dtypes, all bytes and all plain values are the same."""
        return not self.values and all(tensor.verdict is Verdict.SAME for tensor in self.tensors)

    def count(self, verdict: Verdict) -> int:
        """Return how many tensors have a verdict."""
        return sum(tensor.verdict is verdict for tensor in self.tensors)


def compare(a: Side, b: Side, *, read: bool = True, progress: Callable[[int], None] | None = None) -> Comparison:
    """Compare two checkpoints.

    Args:
        a: one of them.
        b: the other.
        read: whether to read values where digests do not show that they are the same; without, such tensors are
            called different.
        progress: called with the bytes of A's tensors that are done.

    Raises:
        CorruptionError: stored bytes are damaged.
    """
    found: list[TensorDiff] = []
    bytes_read = 0
    for name, left in a.tensors.items():
        right = b.tensors.get(name)
        diff = TensorDiff(name, Verdict.ONLY_A, left, None, None) if right is None else _one(a, b, name, read=read)
        if diff.difference is not None and right is not None:
            bytes_read += left.num_bytes + right.num_bytes
        found.append(diff)
        if progress is not None:
            progress(left.num_bytes)
    found += [
        TensorDiff(name, Verdict.ONLY_B, None, right, None)
        for name, right in b.tensors.items()
        if name not in a.tensors
    ]
    names = a.values.keys() | b.values.keys()
    return Comparison(a.name, b.name, tuple(found), tuple(_values(a, b)), len(names), bytes_read)


def _one(a: Side, b: Side, name: str, *, read: bool) -> TensorDiff:
    left, right = a.tensors[name], b.tensors[name]
    if left.shape != right.shape:
        return TensorDiff(name, Verdict.SHAPE, left, right, None)
    if left.dtype == right.dtype:
        content = a.content(name)
        if content is not None and content == b.content(name):
            return TensorDiff(name, Verdict.SAME, left, right, None)
    if not read or (left.dtype != right.dtype and not is_comparable(left.dtype, right.dtype)):
        return TensorDiff(name, Verdict.DIFFERENT, left, right, None)
    difference = _difference(a, b, name)
    if difference.same_bits and left.dtype == right.dtype:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.DIFFERENT if difference.num_different else Verdict.EQUAL
    return TensorDiff(name, verdict, left, right, difference)


def _difference(a: Side, b: Side, name: str) -> Difference:
    left, right = a.tensors[name], b.tensors[name]
    found = Difference(same_bits=left.dtype == right.dtype)
    as_bytes = not is_comparable(left.dtype, right.dtype)
    item_bytes = max(left.dtype.itemsize, right.dtype.itemsize)
    for box in blocks(left.shape, item_bytes, BLOCK_BYTES):
        ours, theirs = a.read(name, box), b.read(name, box)
        if as_bytes:  # of numbers that torch cannot convert, their bytes are compared
            ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
        found.add(ours, theirs, box.offset)
    return found


def _values(a: Side, b: Side) -> Iterator[ValueDiff]:
    for name in dict.fromkeys([*a.values, *b.values]):
        if name not in b.values:
            yield ValueDiff(name, Verdict.ONLY_A, a.values[name], None)
        elif name not in a.values:
            yield ValueDiff(name, Verdict.ONLY_B, None, b.values[name])
        elif not same_value(a.values[name], b.values[name]):
            yield ValueDiff(name, Verdict.DIFFERENT, a.values[name], b.values[name])
