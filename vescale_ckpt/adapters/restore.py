"""Restore: what of a caller's state is to be filled from a snapshot, and everything in which the two disagree.

Planning compares the caller's objects with the stored tree and touches nothing. Then the leaves are filled, by
others; then ``Restore.finish`` installs what is not filled in place: plain values, options, lazily made state.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from vescale_ckpt.adapters.capture import is_stateful
from vescale_ckpt.adapters.draft import Draft, Maker, Phase, Ranks, SameContent, missing
from vescale_ckpt.adapters.names import ModuleTensor, ParameterNames, as_module, is_instance_of, names_in, walk_module
from vescale_ckpt.adapters.options import RestoreOptions, Selector
from vescale_ckpt.adapters.rebuild import NOTHING, Rebuilder, has_arrays, is_group_params, is_live
from vescale_ckpt.adapters.restore_optimizer import OptimizerRestorer
from vescale_ckpt.adapters.taken import unexpected
from vescale_ckpt.adapters.tensors import inner_tensors
from vescale_ckpt.errors import StateError
from vescale_ckpt.state.leaf import LeafKind
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.state.tree import (
    DictNode,
    Key,
    ListNode,
    Node,
    Path,
    PerRankNode,
    TensorNode,
    TupleNode,
    ValueNode,
    describe,
    fqn,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    from vescale_ckpt.format.records import TensorRecord
    from vescale_ckpt.state.leaf import TensorLeaf


_MAX_SHOWN = 8
"""Keys that a note lists."""


@dataclass(slots=True)
class Restore:
    """What one rank restores: a plan, until ``finish``."""

    leaves: tuple[TensorLeaf, ...]
    """Stored path to read, and the memory to fill; the dtype is the target's, which may ask for a cast."""
    problems: tuple[str, ...]
    """Every disagreement that this rank can tell; nothing may be filled while there are any."""
    notes: tuple[str, ...]
    """What options allowed and what was settled without the caller."""
    taken: npt.NDArray[np.bool_]
    """Per leaf of the stored tree, whether this rank has a place for it; see ``unexpected_keys``."""
    _actions: list[Callable[[], None]] = field(repr=False)
    _finished: bool = field(default=False, repr=False)

    def finish(self) -> None:
        """Install everything that is not filled in place; call it once, when all bytes are there.

        Plain values first, then optimizers, then extra state, then objects with ``load_state_dict``: code that is not
        ours and may fail runs last.

        Raises:
            StateError: there are problems, or it has been called before.
        """
        if self.problems or self._finished:
            why = f"{len(self.problems)} problems" if self.problems else "it is finished already"
            raise StateError(f"cannot finish the restore: {why}")
        self._finished = True
        with torch.no_grad():
            for action in self._actions:
                action()


def plan_restore(
    state: Any,
    stored: Node,
    tensors: Mapping[Path, TensorRecord],
    *,
    rank: int,
    world_size: int,
    options: RestoreOptions | None = None,
    saved_world_size: int | None = None,
    same_content: SameContent | None = None,
) -> Restore:
    """Return what of ``state`` is to be filled from a stored tree and its tensors.

    ``tensors`` are in the order of the manifest, which ``alias_of`` counts in. ``saved_world_size`` is the number of
    ranks that saved; unknown, it is taken to be the number of entries of each per-rank value. ``same_content`` is
    asked where the target has one tensor and the snapshot has two under its names; without it they count as different.

    With several ranks, what no rank has a place for only shows when ``taken`` is united over them: ask
    ``unexpected_keys`` then. With one rank it is among the problems already.
    """
    options = options or RestoreOptions()
    selector = Selector(options)
    ranks = Ranks(rank=rank, world_size=world_size, saved_world_size=saved_world_size)
    draft = Draft(stored, tensors, selector, ranks=ranks, same_content=same_content)
    walk = _Walk(draft, ParameterNames(state))
    maker = walk.value(state, stored, (), ())
    if maker is not None:
        draft.problems.append("the state itself cannot be replaced; pass a dict, a module or another object to fill")
    draft.close()
    if world_size == 1:
        draft.problems.extend(unexpected(stored, draft.taken.flags, Selector(options)))
    actions = [action for _, action in sorted(draft.actions, key=lambda item: item[0])]
    return Restore(tuple(draft.leaves), tuple(draft.problems), tuple(draft.notes), draft.taken.flags, actions)


def unexpected_keys(stored: Node, taken: npt.NDArray[np.bool_], options: RestoreOptions) -> tuple[str, ...]:
    """Return one line for each part of the snapshot that no rank has a place for, as far as options do not allow it.

    ``taken`` is ``Restore.taken`` of all ranks that load together, united (or).
    """
    return unexpected(stored, taken, Selector(options))


class _Walk:
    """One walk over the target and the stored tree side by side."""

    def __init__(self, draft: Draft, names: ParameterNames) -> None:
        self._draft = draft
        self._selector = draft.selector
        self._rebuild = Rebuilder(draft, self.value)
        self._optimizers = OptimizerRestorer(draft, names, self._rebuild)
        self._by_type: tuple[tuple[Any, Callable[[Any, Node, Path, Path], Maker | None]], ...] = (
            ((torch.Tensor, np.ndarray, ShardedView), self._array),
            (nn.Module, self._module),
            (torch.optim.Optimizer, self._optimizer),
            (PerRank, self._per_rank),
            (dict, self._dict),
            ((list, tuple), self._sequence),
            (io.BytesIO, self._bytes_io),
        )

    def value(self, target: Any, node: Node, stored: Path, path: Path) -> Maker | None:
        """Plan one value; return what makes its replacement, or None where the caller's own object stays."""
        module = as_module(target)
        target = target if module is None else module
        for types, plan in self._by_type:
            if isinstance(target, types) and not isinstance(target, torch.Size):  # a plain value, though a tuple
                return plan(target, node, stored, path)
        if not self._wanted(node, stored, path):
            return None
        plan = self._stateful if is_stateful(target) else self._plain
        return plan(target, node, stored, path)

    def _child(self, target: Any, below: Mapping[Key, Node], key: Key, stored: Path, path: Path) -> Maker | None:
        """Plan what the target has under a key of a container."""
        path = (*path, key)
        name = fqn(path)
        found = self._draft.locate(below, key, stored, path)
        if self._selector.ignores(name):
            if found is not None:
                self._draft.taken.add_below(*found)
            return None
        if found is not None:
            return self.value(target, found[1], found[0], path)
        if self._selector.renames and isinstance(target, dict | nn.Module):
            return self.value(target, DictNode(()), (*stored, key), path)
        self._missing(target, path)
        return None

    def _missing(self, target: Any, path: Path) -> None:
        if not any(self._selector.takes(name) for name in _leaf_names(target, path)):
            return
        if isinstance(target, torch.Tensor | np.ndarray | ShardedView):
            self._draft.absent(target, path)
        else:
            self._draft.problems.append(missing(fqn(path), _describe(target)))

    def _wanted(self, node: Node, stored: Path, path: Path) -> bool:
        """Return whether ``only`` has this leaf of the target; what it leaves out counts as taken."""
        if self._selector.names(fqn(path)):
            return True
        self._draft.taken.add_below(stored, node)
        return False

    def _array(self, target: Any, node: Node, stored: Path, path: Path) -> Maker | None:
        if not self._wanted(node, stored, path):
            return None
        if isinstance(target, torch.Tensor) and inner_tensors(target) and isinstance(node, DictNode):
            self._rebuild.subclass(target, node, stored, path)
        elif isinstance(node, TensorNode):
            self._draft.fill(target, stored, path)
        else:
            return self._differs(path, "an array", node, stored)
        return None

    def _module(self, target: nn.Module, node: Node, stored: Path, path: Path) -> Maker | None:
        if not isinstance(node, DictNode):
            return self._differs(path, f"a module ({type(target).__name__})", node, stored)
        below = dict(node.items)
        for item in walk_module(target):
            if isinstance(item, ModuleTensor):
                self._child(item.value, below, item.name, stored, path)
            else:
                self._child(_ExtraState(item.module), below, item.name, stored, path)
        return None

    def _optimizer(self, target: torch.optim.Optimizer, node: Node, stored: Path, path: Path) -> Maker | None:
        reason = self._optimizers.plan(target, node, stored, path)
        if reason is None:
            return None
        return self._differs(path, f"an optimizer ({type(target).__name__})", node, stored, reason)

    def _per_rank(self, target: PerRank[Any], node: Node, stored: Path, path: Path) -> Maker | None:
        if not any(self._selector.names(name) for name in _leaf_names(target.value, path)):
            self._draft.taken.add_below(stored, node)
            return None
        if not isinstance(node, PerRankNode):
            return self._differs(path, "a value per rank", node, stored)
        self._draft.taken.add_below(stored, node)
        entry, whole = self._rebuild.per_ranks.plan(target, node, stored, path)
        if entry is None:
            return whole
        if target.value is None:  # whatever this rank had, tensors too: they are whole here
            maker: Maker | None = self._rebuild.make(NOTHING, entry.node, entry.path, path)
        else:
            maker = self.value(target.value, entry.node, entry.path, path)
        return None if maker is None else lambda: dataclasses.replace(target, value=maker())

    def _dict(self, target: dict[Any, Any], node: Node, stored: Path, path: Path) -> Maker | None:
        if not isinstance(node, DictNode):
            return self._differs(path, "a dict", node, stored)
        below = dict(node.items)
        makers = {key: self._child(value, below, key, stored, path) for key, value in target.items()}
        found = {key: maker for key, maker in makers.items() if maker is not None}

        def install() -> None:
            for key, maker in found.items():
                target[key] = maker()

        if found:
            self._draft.later(Phase.VALUES, install)
        return None

    def _sequence(self, target: list[Any] | tuple[Any, ...], node: Node, stored: Path, path: Path) -> Maker | None:
        if is_group_params(path) and isinstance(node, DictNode) and set(target) == set(names_in(node) or ()):
            self._draft.taken.add_below(stored, node)  # a state dict by name, saved from an optimizer
            return None
        kind = ListNode if isinstance(target, list) else TupleNode
        if not isinstance(node, ListNode | TupleNode) or not isinstance(node, kind):
            return self._differs(path, _describe(target), node, stored)
        if len(node.items) != len(target):
            return self._replace_sequence(target, node, stored, path)
        return self._sequence_items(target, node, stored, path)

    def _sequence_items(
        self, target: list[Any] | tuple[Any, ...], node: ListNode | TupleNode, stored: Path, path: Path
    ) -> Maker | None:
        below: dict[Key, Node] = dict(enumerate(node.items))
        makers = [self._child(value, below, index, stored, path) for index, value in enumerate(target)]
        if not any(makers):
            return None

        def items() -> list[Any]:
            return [value if maker is None else maker() for value, maker in zip(target, makers, strict=True)]

        return self._install_sequence(target, items)

    def _replace_sequence(
        self, target: list[Any] | tuple[Any, ...], node: ListNode | TupleNode, stored: Path, path: Path
    ) -> Maker | None:
        """Plan a list or tuple of plain values as one value: it may have another length."""
        if not self._wanted(node, stored, path):
            return None
        if has_arrays(node) or not _is_plain(target):
            return self._differs(path, _describe(target), node, stored)
        maker = self._rebuild.make(NOTHING, node, stored, path)
        return self._install_sequence(target, maker)

    def _install_sequence(self, target: list[Any] | tuple[Any, ...], items: Maker) -> Maker | None:
        if isinstance(target, tuple):
            make = getattr(type(target), "_make", type(target))  # a named tuple stays one
            return lambda: make(items())

        def install() -> None:
            target[:] = items()

        self._draft.later(Phase.VALUES, install)
        return None

    def _bytes_io(self, target: io.BytesIO, node: Node, stored: Path, path: Path) -> Maker | None:
        if not self._wanted(node, stored, path):
            return None
        if not isinstance(node, TensorNode) or self._draft.record(stored).kind != LeafKind.BYTES_IO:
            return self._differs(path, "a BytesIO", node, stored)
        data = self._rebuild.bytes(stored, path, wrap=bytes)

        def install() -> None:
            target.seek(0)
            target.truncate()
            target.write(data())
            target.seek(0)

        self._draft.later(Phase.VALUES, install)
        return None

    def _stateful(self, target: Any, node: Node, stored: Path, path: Path) -> Maker | None:
        if isinstance(node, PerRankNode):
            return self._differs(path, "an object without PerRank", node, stored)
        template = target.state_dict()
        if isinstance(template, dict) and isinstance(node, DictNode):
            self._compare_keys(template, {key for key, _ in node.items}, path)
            if is_instance_of(target, "torch.amp", "GradScaler") and bool(template) != bool(node.items):
                has, lacks = ("enabled", "disabled") if template else ("disabled", "enabled")
                return self._differs(path, f"a GradScaler that is {has}", node, stored, f"it was saved {lacks}")
        maker = self._rebuild.make(template, node, stored, path)
        phase = Phase.EXTRA_STATE if isinstance(target, _ExtraState) else Phase.STATEFUL
        self._draft.later(phase, lambda: target.load_state_dict(maker()))
        return None

    def _compare_keys(self, template: dict[Any, Any], found: set[Any], path: Path) -> None:
        """Note in which keys an object's own state and the stored one differ: what that means is for it to say."""
        for keys, which in (
            (found - template.keys(), "the target has not"),
            (template.keys() - found, "are not stored"),
        ):
            if keys and template:
                shown = ", ".join(sorted(map(str, keys))[:_MAX_SHOWN])
                self._draft.notes.append(f"'{fqn(path)}': {len(keys)} keys of its state {which}: {shown}")

    def _plain(self, target: Any, node: Node, stored: Path, path: Path) -> Maker | None:
        is_value = isinstance(node, ValueNode) or (target is None and not has_arrays(node))
        if isinstance(node, TensorNode):
            kind = self._draft.record(stored).kind
            is_value = kind == LeafKind.BYTES or (target is None and kind == LeafKind.BYTES_IO)
        if not is_value:
            return self._differs(path, f"a {type(target).__name__}", node, stored)
        return self._rebuild.make(NOTHING, node, stored, path)

    def _differs(self, path: Path, has: str, node: Node, stored: Path, way_out: str | None = None) -> Maker | None:
        name = fqn(path)
        way_out = way_out or "make the target like what was saved"
        self._draft.problems.append(
            f"'{name}': the target has {has}, the snapshot has {describe(node)}; {way_out}, or leave it out with "
            f"ignore=({name!r},)"
        )
        self._draft.taken.add_below(stored, node)  # said once, not again as unexpected
        return None


class _ExtraState:
    """A module's extra state as an object that gives and takes its state."""

    def __init__(self, module: nn.Module) -> None:
        self.state_dict = module.get_extra_state
        self.load_state_dict = module.set_extra_state


def _leaf_names(target: Any, path: Path) -> list[str]:
    """Return the name of every leaf of a target."""
    below: list[str] = []
    if isinstance(target, nn.Module):
        below = [fqn((*path, item.name)) for item in walk_module(target)]
    elif isinstance(target, dict | list | tuple):
        items = target.items() if isinstance(target, dict) else enumerate(target)
        below = [name for key, value in items for name in _leaf_names(value, (*path, key))]
    return below or [fqn(path)]


def _is_plain(value: Any) -> bool:
    """Return whether nothing but plain values is in a value."""
    if isinstance(value, dict | list | tuple):
        return all(_is_plain(item) for item in (value.values() if isinstance(value, dict) else value))
    return not (isinstance(value, torch.Tensor | np.ndarray | ShardedView | PerRank | io.BytesIO) or is_live(value))


def _describe(target: Any) -> str:
    if isinstance(target, dict | list | tuple):
        return f"a {type(target).__name__} of {len(target)}"
    if isinstance(target, nn.Module | torch.optim.Optimizer):
        return f"{'a module' if isinstance(target, nn.Module) else 'an optimizer'} ({type(target).__name__})"
    return "extra state of a module" if isinstance(target, _ExtraState) else f"a {type(target).__name__}"
