"""Doing what a record notes, in its order, with as little memory as it takes: a parameter at a time.

A memory is made when the first operation needs it and given away after the last. In between it may be dropped: what a
constructor draws for a layer and a model's own initialisation overwrites later is drawn, since random numbers come in
order, and let go at once.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from vescale_train.torch_private import fill_truncated_normal, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from vescale_train.engine.deferred.record import Operation, Record, View

TRUNCATED = fill_truncated_normal.__name__
_OVERWRITING = frozenset(
    {"normal_", "uniform_", "fill_", "zero_", "bernoulli_", "random_", "exponential_", "copy_", TRUNCATED}
)
"""Operations after which nothing is left of what was in their target."""


def replay(
    record: Record, take: Callable[[int, Callable[[View], torch.Tensor]], None], wanted: Collection[int] | None = None
) -> int:
    """Do all operations of a record on the CPU, and return the most bytes that were in memory at once.

    Args:
        record: what was noted.
        take: called with a memory when nothing will change it any more, and with what makes a view of it a tensor.
            The tensor is the caller's own only until it returns.
        wanted: memories; only what they come from is done, and random numbers are not those of the whole then.
    """
    needed = range(len(record.operations)) if wanted is None else _sources(record, wanted)
    uses: dict[int, list[int]] = defaultdict(list)
    for index in needed:
        for memory in record.operations[index].memories:
            uses[memory].append(index)
    drops = _drops(record, uses)
    held: dict[int, torch.Tensor] = {}
    peak = 0
    for index in needed:
        _do(record.operations[index], held, record)
        peak = max(peak, sum(record.sizes[memory] for memory in held))
        for memory in drops.get(index, ()):
            if index == uses[memory][-1]:
                take(memory, lambda view: _tensor(view, held, record))
            del held[memory]
    return peak


def _do(operation: Operation, held: dict[int, torch.Tensor], record: Record) -> None:
    leaves = [_tensor(leaf, held, record) if _is_view(leaf) else leaf for leaf in operation.leaves]
    args, kwargs = tree_unflatten(leaves, operation.structure)
    result = operation.call(*args, **kwargs)
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for view, tensor in zip(operation.outputs, found, strict=True):
        if view.memory not in held:
            _tensor(view, held, record).copy_(tensor)


def _is_view(leaf: Any) -> bool:
    return hasattr(leaf, "memory") and hasattr(leaf, "offset")


def _tensor(view: View, held: dict[int, torch.Tensor], record: Record) -> torch.Tensor:
    """Return a view of a memory, which is made if it is not there."""
    if view.memory not in held:
        held[view.memory] = torch.empty(record.sizes[view.memory], dtype=torch.uint8)
    flat = held[view.memory].view(view.dtype)
    return flat.as_strided(view.shape, view.stride, view.offset)


def _sources(record: Record, wanted: Collection[int]) -> list[int]:
    """Return the operations that the wanted memories come from, in order."""
    memories, found = set(wanted), []
    for index in reversed(range(len(record.operations))):
        operation = record.operations[index]
        written = {view.memory for view in operation.outputs}
        if written & memories:
            memories |= operation.memories
            found.append(index)
    return found[::-1]


def _drops(record: Record, uses: dict[int, list[int]]) -> dict[int, list[int]]:
    """Return after which operations which memories are let go: the last one, and those before an overwriting one."""
    drops: dict[int, list[int]] = defaultdict(list)
    for memory, indexes in uses.items():
        for before, after in itertools.pairwise(indexes):
            if _overwrites(record.operations[after], memory, record):
                drops[before].append(memory)
        drops[indexes[-1]].append(memory)
    return drops


def _overwrites(operation: Operation, memory: int, record: Record) -> bool:
    """Return whether an operation leaves nothing of what was in a memory."""
    name = getattr(operation.call, "__name__", "").partition(".")[0]
    if name not in _OVERWRITING:
        return False
    target, *read = operation.inputs
    covers = target.memory == memory and _num_bytes(target) == record.sizes[memory]
    return covers and all(view.memory != memory for view in read)


def _num_bytes(view: View) -> int:
    count = 1
    for size in view.shape:
        count *= size
    return count * view.dtype.itemsize
