"""Capture: a caller's state to its tree, and to what this rank holds of every tensor in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ckpt.adapters.groups import KEYS_LEFT_OUT
from vescale_ckpt.adapters.names import ModuleTensor, ParameterNames, as_module, is_instance_of, names_node, walk_module
from vescale_ckpt.adapters.rank_places import VALUE_KEY, axes_of, entry_node
from vescale_ckpt.adapters.tensors import check_dtype, hold, inner_tensors, is_array
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.build import build_tree
from vescale_ckpt.state.leaf import Holding, TensorLeaf
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.tree import DictNode, ListNode, Node, Path, PerRankNode, TensorNode, ValueNode, fqn
from vescale_ckpt.state.values import check_key, type_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

SUBCLASS_KEY = "__tensor_subclass__"
"""In the dict that stands for a tensor subclass made of several tensors: the name of its class."""


@dataclass(frozen=True, slots=True)
class Captured:
    """This rank's state: the tree, and one leaf for every array in it, in the tree's order."""

    tree: Node
    leaves: tuple[TensorLeaf, ...]
    notes: tuple[str, ...] = ()
    """What will come back as something else, one line each."""


def capture(state: Any, *, rank: int) -> Captured:
    """Return this rank's state tree and what it holds of every tensor, as views of the caller's memory.

    A state is any nesting of dicts, lists, tuples, plain values and arrays, with modules, optimizers, objects that
    have ``state_dict`` and ``load_state_dict``, and ``PerRank`` values anywhere in it. FSDP2 modules are resharded.

    Raises:
        InvalidInputError: something cannot be stored whole; ``problems`` in its context lists all that was found.
    """
    capturer = _Capturer(state, rank)
    tree = capturer.visit(state, ())
    if capturer.problems:
        raise InvalidInputError("\n".join(capturer.problems), problems=tuple(capturer.problems))
    return Captured(tree, tuple(capturer.leaves), tuple(capturer.notes))


def is_stateful(value: Any) -> bool:
    """Return whether an object gives and takes its state by ``state_dict`` and ``load_state_dict``."""
    return (
        not isinstance(value, type)
        and callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
    )


def stateful_state(value: Any) -> Any:
    """Return an object's ``state_dict()``; of a learning-rate scheduler without the functions that it holds."""
    state = value.state_dict()
    if is_instance_of(value, "torch.optim.lr_scheduler", "LRScheduler"):
        return _without_functions(state)
    return state


def refuse_unnameable(optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Refuse optimizers that hold the state of other parameters than they show.

    Raises:
        InvalidInputError: it is such an optimizer.
    """
    if is_instance_of(optimizer, "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"):
        raise InvalidInputError(
            f"cannot name the state of the optimizer '{fqn(path)}': ZeroRedundancyOptimizer shows all parameters and "
            f"holds the state of some; use FSDP2, or consolidate_state_dict() and pass its state_dict()",
            fqn=fqn(path),
        )


class _Capturer:
    """One walk over one state."""

    def __init__(self, state: Any, rank: int) -> None:
        self.leaves: list[TensorLeaf] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self._rank = rank
        self._names = ParameterNames(state)
        self._first: dict[Hashable, Path] = {}  # memory -> path of the first leaf that is it
        self._alive: list[Any] = []  # identities are only good while the objects live
        self._in_per_rank = False
        self._by_type: tuple[tuple[type, Callable[[Any, Path], Node]], ...] = (
            (torch.optim.Optimizer, self._optimizer),
            (PerRank, self._per_rank),
        )

    def visit(self, value: Any, path: Path) -> Node:
        """Return the node of a value, and note the leaves and the problems below it."""
        try:
            return build_tree(value, self._special, path, notes=self.notes)
        except InvalidInputError as error:
            self.problems.extend(error.context.get("problems", (error.message,)))
            return ValueNode(None)

    def _special(self, path: Path, value: Any) -> Node | None:
        """Return the node of anything that is not a container of the state or a plain value."""
        try:
            if is_array(value):
                return self._array(value, path)
            if (module := as_module(value)) is not None:
                return self._module(module, path)
            for cls, visit in self._by_type:
                if isinstance(value, cls):
                    return visit(value, path)
            return self.visit(stateful_state(value), path) if is_stateful(value) else None
        except InvalidInputError as error:
            self.problems.append(error.message)
            return ValueNode(None)

    def _array(self, value: Any, path: Path) -> Node:
        if isinstance(value, torch.Tensor) and (inner := inner_tensors(value)):
            items = [(name, self.visit(getattr(value, name), (*path, name))) for name in inner]
            return DictNode(((SUBCLASS_KEY, ValueNode(type_name(value))), *items))
        what = fqn(path)
        if self._in_per_rank and isinstance(value, DTensor):
            raise InvalidInputError(
                f"cannot store '{what}' per rank: a DTensor is one tensor of all ranks; take it out of PerRank, or "
                f"pass its to_local()"
            )
        held = hold(value, what)
        check_dtype(held.dtype, what)
        leaf = TensorLeaf(path, held.dtype, held.global_shape, held.pieces, kind=held.kind, holding=held.holding)
        if self._in_per_rank:
            leaf = dataclasses.replace(leaf, holding=Holding.PER_RANK)
        self._alive.append(value)
        if held.identity is not None:
            first = self._first.setdefault((self._in_per_rank, held.identity), path)
            if first != path:
                leaf = dataclasses.replace(leaf, pieces=(), alias_of=first)
        self.leaves.append(leaf)
        return TensorNode()

    def _module(self, module: nn.Module, path: Path) -> Node:
        items: dict[str, Node] = {}
        for item in walk_module(module):
            if item.name in items:
                raise InvalidInputError(
                    f"cannot store '{fqn(path)}': two of its tensors have the name '{item.name}' once wrappers are "
                    f"taken off; rename one"
                )
            value = item.value if isinstance(item, ModuleTensor) else item.module.get_extra_state()
            items[item.name] = self.visit(value, (*path, item.name))
        return DictNode(tuple(items.items()), union=True)

    def _optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> Node:
        refuse_unnameable(optimizer, path)
        names = self._names.of_optimizer(optimizer, path)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # .get: asking a defaultdict would make the state that is legitimately absent
        named = [(names[id(p)], p, found) for p in parameters if (found := optimizer.state.get(p))]
        state: dict[Any, Node] = {
            name: self._union((*path, "state", name), self._state_of(parameter, found))
            for name, parameter, found in named
        }
        kept: dict[Any, Any] = optimizer.state
        for key, value in kept.items():
            if not isinstance(key, torch.Tensor):
                if key in state:
                    raise InvalidInputError(f"cannot store '{fqn(path)}': it has a state and a parameter named '{key}'")
                state[check_key(key, path)] = self.visit(value, (*path, "state", key))
        groups = tuple(
            self._group(group, names, (*path, "param_groups", index))
            for index, group in enumerate(optimizer.param_groups)
        )
        return DictNode((("state", DictNode(tuple(state.items()), union=True)), ("param_groups", ListNode(groups))))

    def _state_of(self, parameter: torch.Tensor, state: dict[Any, Any]) -> Iterable[tuple[Any, Any]]:
        """Yield what an optimizer keeps for a parameter; what is as large as a flattened one is flattened like it."""
        flat = self._names.flat(parameter)
        for key, value in state.items():
            yield key, flat.view_of(value) if flat is not None and flat.fits(value) else value

    def _group(self, group: dict[str, Any], names: dict[int, str], path: Path) -> Node:
        params = names_node(names[id(parameter)] for parameter in group["params"])
        options = tuple(
            (check_key(key, path), self.visit(value, (*path, key)))
            for key, value in group.items()
            if key not in KEYS_LEFT_OUT
        )
        return DictNode((("params", params), *options))

    def _union(self, path: Path, items: Iterable[tuple[Any, Any]]) -> DictNode:
        return DictNode(tuple((check_key(k, path), self.visit(v, (*path, k))) for k, v in items), union=True)

    def _per_rank(self, value: PerRank[Any], path: Path) -> Node:
        if self._in_per_rank:
            raise InvalidInputError(f"cannot store '{fqn(path)}': it is per rank inside of what is per rank already")
        axes = axes_of(value, fqn(path))
        below = (*path, self._rank, VALUE_KEY) if axes else (*path, self._rank)
        self._in_per_rank = True
        try:
            return PerRankNode(((self._rank, entry_node(axes, self.visit(value.value, below))),))
        finally:
            self._in_per_rank = False


def _without_functions(state: Any) -> Any:
    """Return a scheduler's state with None for every function: code is not state, and torch leaves it out too."""
    if type(state) is dict:
        return {key: _without_functions(value) for key, value in state.items()}
    if type(state) is list:
        return [_without_functions(value) for value in state]
    return None if callable(state) and not is_stateful(state) else state
