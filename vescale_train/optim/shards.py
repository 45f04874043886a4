"""Shards: the part of each parameter that this rank updates, as a flat parameter of its own for a plain optimizer.

The parameters of a bucket are moved into one flat buffer that is laid out as their gradients are. A rank's share of it
is updated in place and then gathered. Where a parameter has less than float32, its shard is a float32 master copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_ckpt.adapters.tensors import dtensor_layout
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Flat
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_train.ddp.collectives import gather_shares, group_rank, group_size, share_of
from vescale_train.ddp.local import local_of, move_to

if TYPE_CHECKING:
    import torch.distributed as dist

    from vescale_train.ddp.bucket import Bucket


class ParameterBucket:
    """The parameters of one bucket in one flat buffer, and this rank's share of them."""

    def __init__(self, bucket: Bucket, *, master: bool) -> None:
        self.gradients = bucket
        self._group = bucket.kind.group
        parameters = bucket.parameters
        first = local_of(parameters[0])
        self._flat = torch.zeros(bucket.layout.numel, dtype=first.dtype, device=first.device)
        for slot, parameter in zip(bucket.layout.slots, parameters, strict=True):
            move_to(parameter, self._flat[slot.offset : slot.stop])
        self._share = share_of(self._flat, self._group)
        is_small = first.is_floating_point() and first.dtype.itemsize < torch.float32.itemsize
        self._master = self._share.float() if master and is_small else None
        self.shards = tuple(self._shard(number) for number in range(len(parameters)))
        self._work: dist.Work | None = None

    @property
    def has_master(self) -> bool:
        """Whether the shards are float32 copies."""
        return self._master is not None

    def write(self, shard: Shard, values: torch.Tensor) -> None:
        """Set a parameter, on this rank, to values of the precision of a master copy: ``[shard.flat.numel()]``."""
        shard.flat.data.copy_(values)
        self._share[shard.at : shard.at + values.numel()].copy_(values)

    def take_gradients(self, unused: frozenset[int]) -> None:
        """Give each shard its reduced gradient; None if no rank used its parameter."""
        share = self.gradients.share
        if self._master is not None and share.dtype != torch.float32:
            share = share.float()
        for shard in self.shards:
            is_unused = id(shard.parameter) in unused
            gradient = None if is_unused else share[shard.at : shard.at + shard.flat.numel()]
            shard.flat.grad = gradient if gradient is None or shard.flat.numel() else None

    def adopt_written(self) -> None:
        """Take over what others wrote into the parameters (a load, an average): these are the truth.

        A master copy holds the bits that its parameter has no room for; where it does not round to it any more, the
        parameter was written.
        """
        if self._master is not None:
            is_same = self._master.to(self._share.dtype) == self._share
            torch.where(is_same, self._master, self._share.float(), out=self._master)

    def start_gather(self) -> None:
        """Start to bring this rank's updated shards to all ranks."""
        if self._master is not None:
            self._share.copy_(self._master)
        self._work = gather_shares(self._flat, self._group)

    def finish_gather(self) -> None:
        """Wait until the parameters are whole and new."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _shard(self, number: int) -> Shard:
        bucket = self.gradients
        slot, parameter = bucket.layout.slots[number], bucket.parameters[number]
        rank, num_ranks = group_rank(self._group), group_size(self._group)
        start, stop = bucket.layout.held(slot, rank, num_ranks)
        at = max(slot.offset + start - rank * bucket.layout.shard_numel(num_ranks), 0) if start < stop else 0
        memory = self._share if self._master is None else self._master
        flat = nn.Parameter(memory[at : at + stop - start])
        ranges = tuple(bucket.layout.held(slot, r, num_ranks) for r in range(num_ranks))
        return Shard(parameter, flat, at, (start, stop), ranges, rank)


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """This rank's part of one parameter."""

    parameter: nn.Parameter
    flat: nn.Parameter
    """Its elements, ``[stop - start]``; the plain optimizer steps on it."""
    at: int
    """Where they start in this rank's share of the bucket."""
    held: tuple[int, int]
    """(start, stop) in the flattened local parameter."""
    ranges: tuple[tuple[int, int], ...]
    """The same for every rank of the group."""
    rank: int

    def view(self, flat: torch.Tensor) -> ShardedView:
        """Return the place in the whole parameter of values that are laid out as the shard is, on the same memory."""
        shape = tuple(self.parameter.shape)
        layout, coordinate = _layout_of(self.parameter)
        whole = Layout(
            (*layout.mesh_shape, len(self.ranges)),
            (*layout.placements, Flat(self.ranges)),
            order=None if layout.order is None else (*layout.order, len(layout.mesh_shape)),
        )
        return ShardedView.laid_out(flat, shape, whole, (*coordinate, self.rank))

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor of the parameter's shape, as a flat copy."""
        made = torch.empty(self.flat.numel(), dtype=whole.dtype, device=self.flat.device)
        view = self.view(made)
        for box, (_, piece) in zip(view.boxes, view.pieces, strict=True):
            piece.copy_(whole[box.slices])
        return made


def _layout_of(parameter: torch.Tensor) -> tuple[Layout, tuple[int, ...]]:
    """Return how a parameter is held without data parallelism, and this rank's coordinate."""
    if not isinstance(parameter, DTensor):
        return Layout((), ()), ()
    return dtensor_layout(parameter, "a parameter"), _coordinate(parameter)


def _coordinate(parameter: DTensor) -> tuple[int, ...]:
    coordinate = parameter.device_mesh.get_coordinate()
    return tuple(coordinate or ())
