"""ZeRO-3 of our own: blocks in flat buffers, cut raggedly; with an exact mode, which ``fully_shard`` has not.

Parameters keep their names and become ``DTensor``s with a ragged shard, so that plain optimizers, norms and checkpoints
take them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.ddp.check import check_equal_start
from vescale_train.errors import ConfigError, StateError
from vescale_train.mesh import AXES, batch_group
from vescale_train.optim.blocks import blocks_of
from vescale_train.optim.flat_block import FlatBlock
from vescale_train.optim.fsdp import refuse_ties
from vescale_train.torch_private import on_backward_end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh


class FlatShardedDataParallel(DistributedDataParallel):
    """Data parallelism in which parameters, gradients and optimizer state are cut over the ranks.

    A gradient is reduced as soon as a block's backward has made it, in every backward pass, so ``no_sync`` changes
    nothing. In exact mode it is kept whole until ``finish_grad_sync``. The optimizer must be made afterwards, with
    ``foreach=False``.

    Args:
        module: changed in place.
        mesh: of one axis, or with the axes ``dp`` and ``fsdp``, over both of which it is cut.
        blocks: what is gathered as one, see ``blocks_of``; everything else is one more.
        param_dtype: compute in this dtype; parameters, gradients and optimizer state keep theirs.
        options: see ``DDPOptions``.

    Raises:
        ConfigError: nothing to train, no such axis, or parameters that flat buffers do not take.
        InvalidInputError: parameters differ between ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        blocks: Sequence[str] | None = None,
        param_dtype: torch.dtype | None = None,
        options: DDPOptions | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._begin(module, mesh, options or DDPOptions())
        chosen = blocks_of(module, blocks)
        refuse_ties(module, chosen)
        check_equal_start(self._trained(), self.group)
        over = _axis_of(mesh)
        self.blocks = tuple(
            FlatBlock(
                part,
                names,
                over,
                exact=self.options.exact,
                param_dtype=param_dtype,
                on_reduce=self._note,
            )
            for part, names in _parts_of(module, chosen)
        )
        self.buckets = ()

    def start_grad_sync(self) -> None:
        """Do nothing: gradients are reduced as they come, or all at the end."""

    def finish_grad_sync(self) -> None:
        """Give parameters their reduced gradients; on all ranks.

        Raises:
            StateError: a backward pass is running.
        """
        if self._step.is_reduced:
            return
        if self._step.in_backward:
            raise StateError("a backward pass has not ended; call finish_grad_sync() after it, or zero_grad_buffer()")
        used = torch.cat([block.used for block in self.blocks])
        if self.num_ranks > 1:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.group)
        flags = [bool(flag) for flag in used.tolist()]
        divisor = self._divisor()
        for block in self.blocks:
            own, flags = flags[: len(block.parameters)], flags[len(block.parameters) :]
            block.finish(divisor, self.num_micro_batches, own)
        self._step.is_reduced = True

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, for the next step."""
        for block in self.blocks:
            block.zero()
        super().zero_grad_buffer()

    def unwrap(self) -> nn.Module:
        """Refuse: the parameters are cut for good.

        Raises:
            StateError: always.
        """
        raise StateError("cannot unwrap a flat-sharded module: its parameters are cut; load it into a new one")

    def _note(self, _: FlatBlock) -> None:
        """Note that gradients of a block have come."""
        if self._step.is_reduced:
            raise StateError("a gradient came after the reduction; call zero_grad_buffer() after each step")
        if not self._step.in_backward:
            self._step.in_backward = True
            on_backward_end(self._end_backward)

    def _end_backward(self) -> None:
        self._step.in_backward = False
        self._step.num_passes += 1
        for block in self.blocks:
            block.end_backward(self.num_micro_batches)


def _axis_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks that see different data as a mesh of one axis."""
    if mesh.ndim == 1 and not set(mesh.mesh_dim_names or ()) & set(AXES):
        return mesh
    found = batch_group(mesh)
    if found is None:
        raise ConfigError(f"cannot shard over the mesh {mesh}: it has no axis 'dp' or 'fsdp'")
    return found


def _parts_of(module: nn.Module, blocks: dict[str, nn.Module]) -> list[tuple[nn.Module, list[str]]]:
    """Return each block, and the module itself, with the names in it of the trained parameters that are its own."""
    inside = {id(p) for block in blocks.values() for p in block.parameters()}
    rest = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    parts = [(block, [n for n, p in block.named_parameters() if p.requires_grad]) for block in blocks.values()]
    return [(part, names) for part, names in [*parts, (module, rest)] if names]
