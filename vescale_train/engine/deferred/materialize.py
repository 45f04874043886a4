"""From a deferred model to one with values, on whatever layout it has been given in between."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from vescale_train.dmodule.parameters import settle_gradient
from vescale_train.engine.deferred.record import Record, Recording, View
from vescale_train.engine.deferred.replay import replay
from vescale_train.errors import StateError
from vescale_train.torch_private import replaced_truncated_normal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NAME = "_vescale_deferred"


@dataclass(frozen=True, slots=True)
class _Deferred:
    record: Record
    places: dict[str, View]
    """Name of a parameter or buffer, each name of a tied one -> where its values come to be."""


def deferred_init(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    """Return the module that ``make(*args, **kwargs)`` returns, on the meta device: nothing is allocated or drawn.

    Raises:
        StateError: making it needs the values of its tensors.
    """
    recording = Recording()
    with recording, replaced_truncated_normal(recording.truncated_normal):
        module = make(*args, **kwargs)
    places = {
        name: recording.record.view_of(tensor)
        for name, tensor in (*module.named_parameters(remove_duplicate=False), *_buffers(module))
        if tensor.is_meta
    }
    module.__dict__[_NAME] = _Deferred(recording.record, places)
    return module


def is_deferred(module: nn.Module) -> bool:
    """Return whether a module still waits for its values."""
    return _NAME in module.__dict__


@torch.no_grad()
def materialize(module: nn.Module, *, device: str | torch.device = "cpu", initialize: bool = True) -> int:
    """Give a deferred module its values, and return the most bytes that whole tensors took at once.

    They are those that its constructor would have given it now: after ``torch.manual_seed(s)``, the very bits of a
    module that is made after ``torch.manual_seed(s)``, however it was cut by ``parallelize`` in between. Each rank
    draws every tensor, keeps its part, and lets the rest go before the next.

    Args:
        module: from ``deferred_init``, parallelized or not; changed in place.
        device: where it shall be.
        initialize: False leaves parameters and saved buffers as they come, for a checkpoint to fill; what a checkpoint
            does not hold is made.

    Raises:
        StateError: the module is not deferred.
    """
    deferred = module.__dict__.get(_NAME)
    if not isinstance(deferred, _Deferred):
        raise StateError(f"cannot materialize {type(module).__name__}: it was not made by deferred_init, or has values")
    filler = _Filler(module, torch.device(device), deferred)
    kept = (
        None if initialize else {deferred.places[name].memory for name in _unsaved(module) if name in deferred.places}
    )
    peak = replay(deferred.record, filler.take, kept)
    filler.leave_empty()
    del module.__dict__[_NAME]
    return peak


class _Filler:
    """Puts values where a module's meta tensors stand, ties and layouts kept."""

    def __init__(self, module: nn.Module, device: torch.device, deferred: _Deferred) -> None:
        self._module = module
        self._device = device
        self._by_memory: dict[int, list[tuple[str, View]]] = {}
        self._made: dict[int, torch.Tensor] = {}
        for name, view in deferred.places.items():
            self._by_memory.setdefault(view.memory, []).append((name, view))

    def take(self, memory: int, tensor_of: Callable[[View], torch.Tensor]) -> None:
        """Fill every parameter and buffer that is a view of a memory."""
        for name, view in self._by_memory.pop(memory, ()):
            self._put(name, tensor_of(view))

    def leave_empty(self) -> None:
        """Give the tensors that no operation filled memory with whatever is in it."""
        for name in [name for places in self._by_memory.values() for name, _ in places]:
            self._put(name, None)
        self._by_memory.clear()

    def _put(self, name: str, values: torch.Tensor | None) -> None:
        path, _, short = name.rpartition(".")
        owner = self._module.get_submodule(path)
        held = owner._parameters if short in owner._parameters else owner._buffers  # noqa: SLF001 - ties are kept here
        old = held.get(short)
        if old is None:
            return  # another rank's stage
        if id(old) not in self._made:
            self._made[id(old)] = self._new(old, values)
            self._made[id(self._made[id(old)])] = self._made[id(old)]
        held[short] = self._made[id(old)]  # type: ignore[assignment]

    def _new(self, old: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        data = self._data(old.detach(), values)
        if not isinstance(old, nn.Parameter):
            return data
        made = nn.Parameter(data, requires_grad=old.requires_grad)
        made.__dict__.update(old.__dict__)
        if isinstance(data, DTensor) and made.requires_grad:
            made.register_hook(partial(settle_gradient, data.placements))  # type: ignore[no-untyped-call]
        return made

    def _data(self, old: torch.Tensor, values: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(old, DTensor):
            return torch.empty_like(old, device=self._device) if values is None else values.to(self._device, copy=True)
        mesh, placements = old.device_mesh, old.placements
        if values is None:
            local = torch.empty_like(old.to_local(), device=self._device)
        else:
            local = distribute_tensor(values.to(self._device), mesh, placements, src_data_rank=None).to_local().clone()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=old.shape, stride=old.stride())


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return module.named_buffers(remove_duplicate=False)


def _unsaved(module: nn.Module) -> list[str]:
    """Return the names of the buffers that a checkpoint does not hold."""
    saved = module.state_dict(keep_vars=True)
    return [name for name, _ in _buffers(module) if name not in saved]
