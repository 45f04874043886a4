"""Global names: a module's tensors by the names they have without any wrapper, and optimizers' parameters by these.

The walk is our own and not ``state_dict()``: it sees ties (no duplicate is removed), runs no user hook, and knows a
wrapper by what it is and not by what its attribute is called, so that a user's own ``module.weight`` keeps its name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale_ckpt.adapters import fsdp1
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.tree import DictNode, ListNode, Node, ValueNode, fqn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vescale_ckpt.adapters.fsdp1 import FlatRange
    from vescale_ckpt.state.sharded_view import ShardedView
    from vescale_ckpt.state.tree import Path

EXTRA_STATE = "_extra_state"
"""torch's name of what ``get_extra_state`` returns."""

# (module that defines the class, class, attribute that holds the wrapped module). The classes are looked up among the
# modules already imported: nobody has an instance of a class that was never imported, and importing them is slow. Any
# other class says the same by its attribute ``checkpoint_wraps``.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def names_node(names: Iterable[str]) -> DictNode:
    """Return the node of a set of names in order, of which ranks may each hold a part."""
    return DictNode(tuple((name, ValueNode(None)) for name in names), union=True)


def names_in(node: Node | None) -> tuple[str, ...] | None:
    """Return the names that a ``names_node`` holds, or a list of names; None if it is neither."""
    names: list[Any] = [None]
    if isinstance(node, DictNode) and all(child == ValueNode(None) for _, child in node.items):
        names = [key for key, _ in node.items]
    elif isinstance(node, ListNode):
        names = [child.value if isinstance(child, ValueNode) else None for child in node.items]
    return tuple(names) if all(isinstance(name, str) for name in names) else None


@dataclass(frozen=True, slots=True)
class ModuleTensor:
    """A parameter or a persistent buffer under its global name."""

    name: str
    tensor: torch.Tensor
    flat: FlatRange | None = None
    """Which elements of the parameter ``tensor`` is, flattened; None where it is what it seems."""

    @property
    def value(self) -> torch.Tensor | ShardedView:
        """What is to be saved or filled under the name."""
        return self.tensor if self.flat is None else self.flat.view_of(self.tensor)


@dataclass(frozen=True, slots=True)
class ModuleExtra:
    """A module that has extra state, under the name of that state."""

    name: str
    module: nn.Module


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Return whether ``value`` is of a class that may not even be imported."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)


def as_module(value: Any) -> nn.Module | None:
    """Return the module that a value is or, being a pipeline stage, holds; None if it is neither."""
    if is_instance_of(value, "torch.distributed.pipelining.stage", "_PipelineStageBase"):
        return value.submod  # type: ignore[no-any-return]
    return value if isinstance(value, nn.Module) else None


def unwrap(module: nn.Module, flat: dict[int, FlatRange] | None = None) -> nn.Module:
    """Return the user's module inside any number of wrappers.

    Args:
        module: the outermost wrapper, or the module itself.
        flat: gets what this rank has of each parameter (by id) that one of the wrappers flattened.

    Raises:
        InvalidInputError: it is wrapped by FSDP1 in a way that leaves parameters without names.
    """
    while True:
        if is_instance_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            inner = fsdp1.settle(module)
            if flat is not None:
                flat |= fsdp1.flat_ranges(module)
            module = inner
            continue
        attribute = _wraps(module)
        if attribute is None:
            return module
        module = getattr(module, attribute)


def _wraps(module: nn.Module) -> str | None:
    """Return the attribute that holds what a module wraps, None if it is no wrapper; a class may say it by itself."""
    for where, name, attribute in _WRAPPERS:
        if is_instance_of(module, where, name):
            return attribute
    return getattr(type(module), "checkpoint_wraps", None)


def walk_module(
    module: nn.Module, prefix: str = "", flat: dict[int, FlatRange] | None = None
) -> Iterator[ModuleTensor | ModuleExtra]:
    """Yield every parameter, persistent buffer and extra state below ``module``, in ``state_dict``'s order.

    A shared tensor or submodule comes once for each of its names. FSDP modules are brought into their sharded form
    first: after a forward without a backward some parameters are still gathered.

    Args:
        module: where to begin.
        prefix: of all names.
        flat: what a module above has flattened of the parameters below it.

    Raises:
        InvalidInputError: FSDP1 without names, or a module that writes keys of its own which this walk would lose.
    """
    flat = dict(flat or {})
    module = unwrap(module, flat)
    if is_instance_of(module, "torch.distributed.fsdp", "FSDPModule"):
        module.reshard()  # type: ignore[operator]
    _refuse_private_keys(module, prefix)
    for name, parameter in module._parameters.items():  # noqa: SLF001 - named_parameters strips and hides
        if parameter is not None:
            yield ModuleTensor(prefix + name, parameter, flat.get(id(parameter)))
    for name, buffer in module._buffers.items():  # noqa: SLF001
        if buffer is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001
            yield ModuleTensor(prefix + name, buffer)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield ModuleExtra(prefix + EXTRA_STATE, module)
    for name, child in module._modules.items():  # noqa: SLF001
        if child is not None:
            yield from walk_module(child, f"{prefix}{name}.", flat)


def find_modules(state: Any) -> Iterator[tuple[Path, nn.Module]]:
    """Yield (path, module) of every module anywhere in a state, in order."""
    for path, value in _objects(state, (), frozenset()):
        if (module := as_module(value)) is not None:
            yield path, module


def find_optimizers(state: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield every optimizer anywhere in a state."""
    for _, value in _objects(state, (), frozenset()):
        if isinstance(value, torch.optim.Optimizer):
            yield value


def _objects(state: Any, path: Path, above: frozenset[int]) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of everything that is no container; a container in itself is passed by."""
    if isinstance(state, PerRank):
        yield from _objects(state.value, path, above)
    elif isinstance(state, dict | list | tuple):
        if id(state) not in above:
            above |= {id(state)}
            for key, value in state.items() if isinstance(state, dict) else enumerate(state):
                yield from _objects(value, (*path, key), above)
    else:
        yield path, state


@dataclass(frozen=True, slots=True)
class ParameterName:
    """One name of a parameter: the place of its module in the state, and its name in that module."""

    module: Path
    name: str


class ParameterNames:
    """The names of all parameters of all modules in one state, by identity."""

    def __init__(self, state: Any) -> None:
        self._names: dict[int, list[ParameterName]] = {}
        self._flat: dict[int, FlatRange] = {}
        self._alive: list[torch.Tensor] = []  # an id is only good while its object lives
        for path, module in find_modules(state):
            for item in walk_module(module):
                if isinstance(item, ModuleTensor):
                    self._names.setdefault(id(item.tensor), []).append(ParameterName(path, item.name))
                    self._alive.append(item.tensor)
                    if item.flat is not None:
                        self._flat[id(item.tensor)] = item.flat

    def of(self, parameter: torch.Tensor) -> tuple[ParameterName, ...]:
        """Return every name of a parameter, first one first; none if no module in the state has it."""
        return tuple(self._names.get(id(parameter), ()))

    def flat(self, parameter: torch.Tensor) -> FlatRange | None:
        """Return which elements of a flattened parameter this one is, None where it is what it seems."""
        return self._flat.get(id(parameter))

    def of_optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> dict[int, str]:
        """Return the name of each of an optimizer's parameters, by id.

        It is the name in the module. Where parameters of two modules would share one, every name starts with the
        place of its module.

        Raises:
            InvalidInputError: a parameter is in no module of the state.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nameless = sum(not self.of(p) for p in parameters)
        if nameless:
            raise InvalidInputError(
                f"cannot name the parameters of the optimizer '{fqn(path)}': {nameless} of its {len(parameters)} "
                f"parameters are in no module of this state; put the model in the state too, next to the optimizer",
                fqn=fqn(path),
            )
        names = {id(p): self.of(p)[0].name for p in parameters}
        if len(set(names.values())) < len(names):
            names = {id(p): fqn((*self.of(p)[0].module, self.of(p)[0].name)) for p in parameters}
        return names


def _refuse_private_keys(module: nn.Module, prefix: str) -> None:
    """Refuse a module whose own ``_save_to_state_dict`` writes keys that are no parameter, buffer or extra state."""
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:  # noqa: SLF001
        return
    written: dict[str, Any] = {}
    module._save_to_state_dict(written, "", keep_vars=True)  # noqa: SLF001
    known = {*module._parameters, *module._buffers, EXTRA_STATE}  # noqa: SLF001
    private = [key for key in written if key not in known]
    if private:
        raise InvalidInputError(
            f"cannot save module '{prefix.removesuffix('.')}' of {type(module).__name__}: it writes keys of its own "
            f"({', '.join(private[:5])}); pass its state_dict() instead of the module",
            fqn=prefix,
        )
