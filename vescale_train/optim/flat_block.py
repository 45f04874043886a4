"""A block whose parameters are shares of one flat buffer, whole only while it computes.

Its forward gathers the buffer, runs on views of it and lets go of it. What autograd saves of the parameters is saved as
a place in the buffer, so that backward gathers it again. The gradient of the gather is a reduce-scatter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Function
from torch.func import functional_call

from vescale_train.ddp.collectives import gather_shares, group_rank, group_size, share_of, sum_shares
from vescale_train.ddp.layout import plan_buckets
from vescale_train.ddp.local import local_of
from vescale_train.ddp.units import Units
from vescale_train.errors import ConfigError
from vescale_train.ragged import RaggedShard, from_local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class _Saved:
    """A view of the flat buffer, by its place."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Caller(nn.Module):
    """Calls a block's own forward, under names that parameters can be put in for."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._original: Callable[..., Any] = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._original(*args, **kwargs)


class FlatBlock:
    """The parameters of one block, cut over the ranks of a mesh of one axis.

    Args:
        module: the block; its parameters become ragged ``DTensor``s and its forward is wrapped.
        names: of the parameters that are its own, each one once.
        mesh: the ranks.
        exact: keep the gradient of each backward pass apart, and sum them in the fixed tree.
        param_dtype: compute in this dtype; None: in that of the parameters.
        on_reduce: called whenever gradients have come.

    Raises:
        ConfigError: parameters of several dtypes, or that are cut already.
    """

    def __init__(
        self,
        module: nn.Module,
        names: list[str],
        mesh: DeviceMesh,
        *,
        exact: bool,
        param_dtype: torch.dtype | None,
        on_reduce: Callable[[FlatBlock], None],
    ) -> None:
        whole = dict(module.named_parameters())
        parameters = [whole[name] for name in names]
        _refuse_mixed(names, parameters)
        self._group = mesh.get_group()
        self._exact = exact
        self._on_reduce = on_reduce
        self._keys = [f"block.{name}" for name in names]
        (self._layout,) = plan_buckets(
            [p.numel() for p in parameters], bucket_size=None, num_ranks=group_size(self._group)
        )
        first = parameters[0]
        self._dtype = param_dtype or first.dtype
        flat = torch.zeros(self._layout.numel, dtype=first.dtype, device=first.device)
        for slot in self._layout.slots:
            flat[slot.offset : slot.stop] = parameters[slot.index].detach().reshape(-1)
        self._share = share_of(flat, self._group).clone()
        self._flat: torch.Tensor | None = None
        self._unit: torch.Tensor | None = None
        self._units: Units | None = None
        self.used: torch.Tensor = torch.zeros(len(names), dtype=torch.int32, device=first.device)
        """Per parameter, whether it got a gradient in this step, on this rank."""
        self.parameters = [self._cut(index, p, mesh) for index, p in enumerate(parameters)]
        """The ragged ones, in the order of the names."""
        _install(module, dict(zip(map(id, parameters), self.parameters, strict=True)))
        self._caller = _Caller(module)
        module.forward = self._forward

    @property
    def is_gathered(self) -> bool:
        """Whether the whole parameters are on this rank now."""
        return self._flat is not None

    def add(self, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Take gradients of whole parameters, and add those of this rank's parts up, unless that comes later."""
        flat = torch.zeros(self._layout.numel, dtype=self._share.dtype, device=self._share.device)
        for slot in self._layout.slots:
            gradient = gradients[slot.index]
            if gradient is not None:
                flat[slot.offset : slot.stop] = gradient.reshape(-1)
                self.used[slot.index] = 1
        self._flat = None
        self._on_reduce(self)
        if self._exact:
            self._unit = flat if self._unit is None else self._unit.add_(flat)
            return
        work = sum_shares(flat, self._group)
        if work is not None:
            work.wait()
        for parameter, local in zip(self.parameters, self._parts(share_of(flat, self._group)), strict=True):
            if parameter.grad is None:
                parameter.grad = _like(parameter, local)
            else:
                local_of(parameter.grad).add_(local)

    def end_backward(self, num_micro_batches: int | None) -> None:
        """Close a backward pass, in exact mode."""
        if self._exact:
            if self._units is None:
                self._units = Units(self._group, num_micro_batches)
            self._units.add(torch.zeros_like(self._whole_like()) if self._unit is None else self._unit)
            self._unit = None

    def finish(self, divisor: int, num_micro_batches: int | None, used: list[bool]) -> None:
        """Give every parameter that any rank used its reduced gradient, the others none."""
        if self._exact:
            units = self._units or Units(self._group, num_micro_batches)
            share = units.reduce(self._whole_like(), shard=True)
            for parameter, local in zip(self.parameters, self._parts(share), strict=True):
                parameter.grad = _like(parameter, local)
        for parameter, is_used in zip(self.parameters, used, strict=True):
            if not is_used:
                parameter.grad = None
            elif parameter.grad is not None and divisor != 1:
                parameter.grad.div_(divisor)

    def zero(self) -> None:
        """Forget all gradients."""
        self._unit = self._units = self._flat = None
        self.used.zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def gather(self) -> list[torch.Tensor]:
        """Return the whole parameters, as views of the gathered buffer, in the order of the names."""
        flat = self._gathered()
        found = [flat[slot.offset : slot.stop] for slot in sorted(self._layout.slots, key=lambda slot: slot.index)]
        return [part.view(p.shape) for part, p in zip(found, self.parameters, strict=True)]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        # leaves of their own: torch's way from a DTensor to its local tensor does not bear a gradient that is None
        parts = [local_of(parameter).requires_grad_() for parameter in self.parameters]
        views = _Gather.apply(self, *parts)  # type: ignore[no-untyped-call]
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            whole: Mapping[str, torch.Tensor] = dict(zip(self._keys, views, strict=True))
            result = functional_call(self._caller, dict(whole), args, kwargs)
        self._flat = None
        return result

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Saved:
        flat = self._flat
        if flat is None or tensor.untyped_storage().data_ptr() != flat.untyped_storage().data_ptr():
            return tensor
        return _Saved(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def _unpack(self, saved: torch.Tensor | _Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return self._gathered().as_strided(saved.shape, saved.stride, saved.offset)

    def _gathered(self) -> torch.Tensor:
        if self._flat is None:
            flat = torch.empty(self._layout.numel, dtype=self._dtype, device=self._share.device)
            share_of(flat, self._group).copy_(self._share)
            work = gather_shares(flat, self._group)
            if work is not None:
                work.wait()
            self._flat = flat
        return self._flat

    def _parts(self, share: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each parameter in a share, in the order of the names."""
        rank, num_ranks = group_rank(self._group), group_size(self._group)
        found: dict[int, torch.Tensor] = {}
        for slot in self._layout.slots:
            start, stop = self._layout.held(slot, rank, num_ranks)
            at = slot.offset + start - rank * self._layout.shard_numel(num_ranks) if start < stop else 0
            found[slot.index] = share[at : at + stop - start]
        return [found[index] for index in range(len(found))]

    def _cut(self, index: int, parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        num_ranks = group_size(self._group)
        slot = next(slot for slot in self._layout.slots if slot.index == index)
        held = [self._layout.held(slot, rank, num_ranks) for rank in range(num_ranks)]
        placement = RaggedShard(tuple(range(parameter.ndim)), tuple(stop - start for start, stop in held))
        return nn.Parameter(from_local(self._parts(self._share)[index], mesh, [placement], parameter.shape))

    def _whole_like(self) -> torch.Tensor:
        return torch.empty(self._layout.numel, dtype=self._share.dtype, device=self._share.device)


class _Gather(Function):
    """Parts of parameters to whole ones; the block takes the gradients of these itself."""

    @staticmethod
    def forward(ctx: Any, block: FlatBlock, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.block = block
        ctx.set_materialize_grads(False)
        return tuple(block.gather())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.block.add(gradients)
        return (None,) * (1 + len(gradients))


def _like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    return from_local(local, parameter.device_mesh, parameter.placements, parameter.shape)


def _install(module: nn.Module, replaced: Mapping[int, nn.Parameter]) -> None:
    """Put new parameters in the places of others, tied ones in all of theirs."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in replaced:
                setattr(inner, name, replaced[id(parameter)])


def _refuse_mixed(names: list[str], parameters: list[nn.Parameter]) -> None:
    dtypes = {parameter.dtype for parameter in parameters}
    if len(dtypes) > 1:
        raise ConfigError(f"cannot keep {names[:5]} in one flat buffer: they have dtypes {sorted(map(str, dtypes))}")
    cut = [name for name, parameter in zip(names, parameters, strict=True) if type(parameter.data) is not torch.Tensor]
    scalars = [name for name, parameter in zip(names, parameters, strict=True) if not parameter.ndim]
    if cut or scalars:
        raise ConfigError(
            f"cannot cut {(cut or scalars)[:5]} as flat shards: "
            f"{'they are cut already' if cut else 'they have no dims'}; use ZeRO-1 or 2"
        )
