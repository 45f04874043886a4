"""Rebuild: new values and containers as a stored tree describes them, with memory to fill for its arrays.

For everything that has no place of its own to be filled in: what is handed to ``load_state_dict``, the options of an
optimizer, and a whole state where the caller has none. A template, if there is one, lends its memory, its device and
the classes of its dicts.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ckpt.adapters.capture import SUBCLASS_KEY, is_stateful
from vescale_ckpt.adapters.rank_places import entries_of
from vescale_ckpt.adapters.restore_per_rank import PerRankRestorer
from vescale_ckpt.adapters.tensors import inner_tensors
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.leaf import LeafKind
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.state.tree import (
    DictKind,
    DictNode,
    ListNode,
    Node,
    Path,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    fqn,
    walk,
)
from vescale_ckpt.state.values import from_value, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_ckpt.adapters.draft import Draft, Maker

NewMemory: TypeAlias = "Callable[[tuple[int, ...], torch.dtype], torch.Tensor]"
"""Makes a new CPU tensor of a shape and dtype."""

NOTHING: Final = object()
"""There is no template."""

_MAKE_DICT: Final[dict[DictKind, type[dict[Any, Any]]]] = {
    DictKind.DICT: dict,
    DictKind.ORDERED: collections.OrderedDict,
    DictKind.COUNTER: collections.Counter,
}


def is_live(value: Any) -> bool:
    """Return whether an object takes its state by itself, whatever stands in its place in a container."""
    return isinstance(value, nn.Module | torch.optim.Optimizer) or (not isinstance(value, dict) and is_stateful(value))


def has_arrays(node: Node) -> bool:
    """Return whether a tensor is anywhere below a stored node."""
    return any(isinstance(child, TensorNode) for _, child in walk(node))


def is_group_params(path: Path) -> bool:
    """Return whether a path is where a parameter group has the names of its parameters."""
    return len(path) > 2 and path[-1] == "params" and path[-3] == "param_groups"


class Rebuilder:
    """Makes values out of stored nodes; plans the fill of their arrays."""

    def __init__(
        self,
        draft: Draft,
        live: Callable[[Any, Node, Path, Path], Maker | None] | None = None,
        *,
        device: torch.device | None = None,
        empty: NewMemory | None = None,
    ) -> None:
        self._draft = draft
        self._live = live
        self._device = device or torch.device("cpu")
        self._empty = empty
        self.per_ranks = PerRankRestorer(draft, lambda node, stored, target: self.make(NOTHING, node, stored, target))

    def make(self, template: Any, node: Node, stored: Path, target: Path) -> Maker:  # noqa: PLR0911 - one a node
        """Return what makes the value of a stored node after the fill."""
        if self._live is not None and is_live(template):
            maker = self._live(template, node, stored, target)
            return maker or _constant(template)
        match node:
            case TensorNode():
                return self._array(template, stored, target)
            case ValueNode():
                self._draft.taken.add(stored)
                value = from_value(node.value)
                # a function that a scheduler holds is not stored; its place says None
                return _constant(template if value is None and callable(template) else value)
            case PerRankNode():
                return self._per_rank(template, node, stored, target)
            case DictNode():
                return self._dict(template, node, stored, target)
            case ListNode() | TupleNode():
                return self._sequence(template, node, stored, target)

    def _dict(self, template: Any, node: DictNode, stored: Path, target: Path) -> Maker:
        items = dict(node.items)
        if SUBCLASS_KEY in items:
            return self.subclass(template, node, stored, target)
        if is_group_params(stored):
            self._draft.taken.add_below(stored, node)
            return lambda: list(items)
        known = template if isinstance(template, dict) else {}
        makers = {
            key: self.make(known.get(key, NOTHING), child, (*stored, key), (*target, key)) for key, child in node.items
        }
        for key, value in known.items():
            if key not in makers and _is_tensor(value):
                self._draft.absent(value, (*target, key))
        if isinstance(template, dict):
            return lambda: _like(template, {key: maker() for key, maker in makers.items()})
        make = _MAKE_DICT[node.kind]
        return lambda: make({key: maker() for key, maker in makers.items()})

    def _sequence(self, template: Any, node: ListNode | TupleNode, stored: Path, target: Path) -> Maker:
        known = template if isinstance(template, list | tuple) and len(template) == len(node.items) else None
        makers = [
            self.make(NOTHING if known is None else known[index], child, (*stored, index), (*target, index))
            for index, child in enumerate(node.items)
        ]
        if isinstance(node, ListNode):
            return lambda: [maker() for maker in makers]
        return lambda: tuple(maker() for maker in makers)

    def _per_rank(self, template: Any, node: PerRankNode, stored: Path, target: Path) -> Maker:
        known: PerRank[Any] = template if isinstance(template, PerRank) else PerRank(NOTHING)
        self._draft.taken.add_below(stored, node)
        if self._draft.ranks.rank is None:
            found = sorted(entries_of(node, stored), key=lambda entry: entry.place.rank)
            makers = {e.place.rank: self.make(NOTHING, e.node, e.path, (*target, e.place.rank)) for e in found}
            return lambda: {rank: maker() for rank, maker in makers.items()}
        entry, whole = self.per_ranks.plan(known, node, stored, target)
        if entry is None:
            return whole or _constant(None)
        maker = self.make(known.value, entry.node, entry.path, target)
        return lambda: dataclasses.replace(known, value=maker())

    def subclass(self, template: Any, node: DictNode, stored: Path, target: Path) -> Maker:
        """Plan to fill a tensor subclass that is made of several tensors."""
        items, draft, name = dict(node.items), self._draft, fqn(target)
        draft.taken.add((*stored, SUBCLASS_KEY))
        inner = inner_tensors(template) if isinstance(template, torch.Tensor) else ()
        found = items[SUBCLASS_KEY]
        is_class = isinstance(found, ValueNode) and inner and found.value == type_name(template)
        if not is_class or set(inner) != set(items) - {SUBCLASS_KEY}:
            stored_class = found.value if isinstance(found, ValueNode) else "tensor subclass"
            has = "nothing" if template is NOTHING else f"a {type_name(template)}"
            draft.problems.append(
                f"'{name}': the snapshot has a {stored_class}, which is made of {', '.join(map(str, items))}; the "
                f"target has {has}; make one there first (an optimizer makes its own in a first step)"
            )
            draft.taken.add_below(stored, node)
            return _constant(template)
        for key in inner:
            self.make(getattr(template, key), items[key], (*stored, key), (*target, key))
        return _constant(template)

    def _array(self, template: Any, stored: Path, target: Path) -> Maker:
        record = self._draft.record(stored)
        if record.kind in {LeafKind.BYTES.value, LeafKind.BYTES_IO.value}:
            return self.bytes(stored, target, wrap=io.BytesIO if record.kind == LeafKind.BYTES_IO.value else bytes)
        if isinstance(template, DTensor | ShardedView) or self._fits(template, stored):
            self._draft.fill(template, stored, target)
            return _constant(template)
        device = template.device if isinstance(template, torch.Tensor) else self._device
        if record.kind == LeafKind.NUMPY.value:
            device = torch.device("cpu")
        tensor = self._draft.allocate(
            stored,
            target,
            key=str(device),
            make=self._empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device)),
        )
        return _constant(tensor.numpy() if record.kind == LeafKind.NUMPY.value else tensor)

    def bytes(self, stored: Path, target: Path, *, wrap: Callable[[bytes], Any]) -> Maker:
        """Return what makes bytes, or what ``wrap`` makes of them, from a stored array of bytes."""
        tensor = self._draft.allocate(
            stored, target, key="bytes", make=lambda shape, dtype: torch.empty(shape, dtype=dtype)
        )
        return lambda: wrap(tensor.numpy().tobytes())

    def _fits(self, template: Any, stored: Path) -> bool:
        """Return whether a template's own memory can take a stored array as it is."""
        record = self._draft.record(stored)
        if isinstance(template, torch.Tensor):
            return (
                record.kind == LeafKind.TENSOR.value
                and tuple(template.shape) == tuple(record.shape)
                and not template.is_meta
                and dtype_name(template.dtype) == record.dtype
            )
        return (
            isinstance(template, np.ndarray)
            and record.kind == LeafKind.NUMPY.value
            and template.shape == tuple(record.shape)
            and template.flags.writeable
            and template.flags.c_contiguous
            and template.dtype.name == record.dtype
        )


def _constant(value: Any) -> Maker:
    return lambda: value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray | ShardedView)


def _like(template: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the template's class, with whatever else it holds (a default factory), and these items."""
    made = copy.copy(template)
    made.clear()
    made.update(items)
    return made
