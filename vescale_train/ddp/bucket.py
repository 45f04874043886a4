"""A bucket: the gradients of some parameters in one flat buffer, which is reduced by one collective.

In fast mode gradients are added up where they stand. In exact mode the gradient of each backward pass (a *unit*) is
kept apart, and units are summed in the one order that does not depend on who holds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vescale_train.ddp.collectives import gather_shares, group_size, share_of, sum_shares, sum_whole
from vescale_train.ddp.layout import plan_buckets
from vescale_train.ddp.local import local_of
from vescale_train.ddp.units import Units

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from vescale_train.ddp.layout import BucketLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketKind:
    """What is done with the gradients of a bucket."""

    group: dist.ProcessGroup | None
    dtype: torch.dtype | None
    """In which gradients are added up; None: each parameter's own."""
    shard: bool
    """Each rank needs the sum of its own share only."""
    release: bool
    """Keep nothing but the share from the reduction on."""
    exact: bool


class Bucket:
    """Gradients of some parameters, from the first that arrives to the reduced sum."""

    def __init__(self, layout: BucketLayout, parameters: Sequence[torch.nn.Parameter], kind: BucketKind) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        """In the order of the layout's slots."""
        self.kind = kind
        self.launched = False
        self._device = local_of(parameters[0]).device
        self._dtype = kind.dtype or parameters[0].dtype
        self._full: torch.Tensor | None = None
        self._share: torch.Tensor | None = None
        self._units: Units | None = None
        self._added: set[int] = set()  # slots that hold a gradient in ``_full``
        self._arrived: set[int] = set()  # slots whose gradient of this backward pass has come
        self._work: dist.Work | None = None

    @property
    def is_complete(self) -> bool:
        """Whether this backward pass has given every gradient."""
        return len(self._arrived) == len(self.parameters)

    @property
    def share(self) -> torch.Tensor:
        """This rank's share of the reduced gradients, padding included: ``[shard_numel]``."""
        if self._share is None:
            self._share = share_of(self._buffer(), self.kind.group)
        return self._share

    def gradient(self, number: int) -> torch.Tensor:
        """Return the whole gradient of the parameter in a slot, flat; of use where nothing is sharded."""
        slot = self.layout.slots[number]
        return self._buffer()[slot.offset : slot.stop]

    def gather(self) -> None:
        """Bring the whole of the reduced gradients to every rank, where each has its share only; all ranks call it."""
        if self.kind.shard and group_size(self.kind.group) > 1:
            share, flat = self.share, self._buffer()
            share_of(flat, self.kind.group).copy_(share)
            work = gather_shares(flat, self.kind.group)
            if work is not None:
                work.wait()

    def add(self, number: int, gradient: torch.Tensor) -> None:
        """Take in the gradient of the parameter in a slot."""
        slot = self.layout.slots[number]
        place = self._buffer()[slot.offset : slot.stop].view(gradient.shape)
        # the first one is copied: 0.0 + -0.0 is not -0.0
        if number in self._added:
            place.add_(gradient)
        else:
            place.copy_(gradient)
        self._added.add(number)
        self._arrived.add(number)

    def end_backward(self, num_micro_batches: int | None) -> None:
        """Close a backward pass; the number of them in a step, over all ranks, is of use in exact mode only."""
        self._arrived.clear()
        if self.kind.exact:
            if self._units is None:
                self._units = Units(self.kind.group, num_micro_batches)
            self._units.add(self._buffer())
            self._full = None
            self._added.clear()

    def start(self, divisor: int, num_micro_batches: int | None) -> None:
        """Start the reduction: the sum over ranks (and units) divided by ``divisor``."""
        self.launched = True
        if self.kind.exact:
            self._sum_units(divisor, num_micro_batches)
            return
        flat = self._buffer()
        if divisor != 1:
            flat.div_(divisor)  # before the sum, which could overflow
        self._work = (sum_shares if self.kind.shard else sum_whole)(flat, self.kind.group)

    def finish(self) -> None:
        """Wait for the reduction."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self.kind.release and self._share is None and group_size(self.kind.group) > 1:
            self._share = share_of(self._buffer(), self.kind.group).clone()
            self._full = None

    def zero(self) -> None:
        """Forget all gradients."""
        self.launched = False
        self._units = None
        self._added.clear()
        self._arrived.clear()
        self._share = None
        if self._full is not None:
            self._full.zero_()

    def _sum_units(self, divisor: int, num_micro_batches: int | None) -> None:
        like = self._buffer()
        units = self._units or Units(self.kind.group, num_micro_batches)
        self._units = None
        found = units.reduce(like, shard=self.kind.shard).div_(divisor)
        if self.kind.shard and group_size(self.kind.group) > 1:
            self._share, self._full = found, None
        else:
            self._full = found

    def _buffer(self) -> torch.Tensor:
        if self._full is None:
            self._full = torch.zeros(self.layout.numel, dtype=self._dtype, device=self._device)
        return self._full


def make_buckets(
    parameters: Sequence[torch.nn.Parameter], kind: BucketKind, bucket_size: int | None
) -> tuple[Bucket, ...]:
    """Return the buckets of all parameters, each of one dtype and device, in the order in which gradients come."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, parameter in enumerate(parameters):
        alike.setdefault((parameter.dtype, local_of(parameter).device), []).append(index)
    found: list[tuple[int, Bucket]] = []
    for indexes in alike.values():
        numels = [local_of(parameters[i]).numel() for i in indexes]
        for layout in plan_buckets(numels, bucket_size=bucket_size, num_ranks=group_size(kind.group)):
            members = [indexes[slot.index] for slot in layout.slots]
            found.append((min(members), Bucket(layout, [parameters[i] for i in members], kind)))
    # a bucket is complete when the gradient of its first parameter has come
    return tuple(bucket for _, bucket in sorted(found, key=lambda item: -item[0]))
