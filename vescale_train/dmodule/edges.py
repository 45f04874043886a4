"""Hooks that lay out what goes into a module, what comes out of it, and the weights it sees, as a plan says."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vescale_train.dmodule.layouts import laid
from vescale_train.errors import PlanError
from vescale_train.torch_private import no_torch_function

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from vescale_train.plan import Edge, Placements


def hook_edges(model: nn.Module, mesh: DeviceMesh, edges: Mapping[str, Edge]) -> None:
    """Let every module that an edge names lay out its values by itself."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, edge in edges.items():
        owner, _, what = name.rpartition(".")
        lay = _Lay(name=name, mesh=mesh, edge=edge, attribute=what)
        module = modules[owner]
        if what in module._parameters:  # noqa: SLF001 - a module of this name may not say so otherwise
            module.register_forward_pre_hook(lay.swap_weight)
            module.register_forward_hook(lay.restore_weight, always_call=True)
        elif what == "input":
            module.register_forward_pre_hook(lay.inputs, with_kwargs=True)
        else:
            module.register_forward_hook(lay.outputs, prepend=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lay:
    """One edge of a plan at one module."""

    name: str
    mesh: DeviceMesh
    edge: Edge
    attribute: str

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lay:
        return self

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Lay out positional and keyword arguments."""
        with no_torch_function():
            if not isinstance(self.edge, tuple):
                return args, {**kwargs, **self._named(kwargs)}
            if len(args) >= len(self.edge) or not kwargs:
                return tuple(self._positional(args)), kwargs
            # callers may name what the plan counts: what a position is called stands in the signature of forward
            declared = list(inspect.signature(module.forward).parameters)[len(args) : len(self.edge)]
            names = [name for name in declared if name in kwargs]
            values = self._positional((*args, *(kwargs[name] for name in names)))
            return tuple(values[: len(args)]), {**kwargs, **dict(zip(names, values[len(args) :], strict=True))}

    def outputs(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        """Lay out what forward returned: a tensor, a tuple, or a mapping."""
        with no_torch_function():
            if isinstance(output, Tensor):
                return self._one(output, self.edge[0] if isinstance(self.edge, tuple) else None)
            if isinstance(output, (tuple, list)):
                return type(output)(self._positional(tuple(output)))
            names = [name for name in self.edge if name in output] if not isinstance(self.edge, tuple) else list(output)
            edge = dict(zip(names, self.edge, strict=False)) if isinstance(self.edge, tuple) else self.edge
            for name in names:
                if edge.get(name) is not None:
                    output[name] = self._one(output[name], edge[name])
            return output

    def swap_weight(self, module: nn.Module, _args: tuple[Any, ...]) -> None:
        """Let the module see its weight laid out otherwise, with the gradient on the way back."""
        parameter = module._parameters[self.attribute]  # noqa: SLF001
        placements = self.edge[0] if isinstance(self.edge, tuple) else None
        if parameter is None or placements is None:
            return
        module.__dict__.setdefault("_vescale_held", {})[self.attribute] = parameter
        with no_torch_function():
            module._parameters[self.attribute] = laid(parameter, self.mesh, placements)  # type: ignore[assignment]  # noqa: SLF001

    def restore_weight(self, module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Give the module its parameter back."""
        held = module.__dict__.get("_vescale_held", {})
        if self.attribute in held:
            module._parameters[self.attribute] = held.pop(self.attribute)  # noqa: SLF001

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        edge = self.edge
        if isinstance(edge, tuple):
            return {}
        return {name: self._one(values[name], placements) for name, placements in edge.items() if name in values}

    def _positional(self, values: tuple[Any, ...]) -> list[Any]:
        edge = self.edge if isinstance(self.edge, tuple) else ()
        if len(edge) > len(values):
            raise PlanError(
                f"cannot lay out {self.name!r}: the plan speaks of {len(edge)} values, but forward was given or gave "
                f"{len(values)}; name fewer, or name keyword arguments with a dict"
            )
        return [*(self._one(v, e) for v, e in zip(values, edge, strict=False)), *values[len(edge) :]]

    def _one(self, value: Any, placements: Placements | None) -> Any:
        if placements is None or value is None:
            return value
        if not isinstance(value, Tensor):
            raise PlanError(
                f"cannot lay out {self.name!r} as {placements}: found a {type(value).__name__}, want a tensor; "
                "put None at its place in the plan"
            )
        return laid(value, self.mesh, placements)
