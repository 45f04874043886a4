"""The memory of saving: slabs to stage in and blocks to write from, within one budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vescale_ckpt.stage.memory import BufferPool

_SLAB_BYTES = 32 << 20
_BLOCK_BYTES = 8 << 20
_MOST_BLOCKS = 24
_FEWEST_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Pools:
    """Both pools of one saver."""

    slabs: BufferPool
    blocks: BufferPool

    @property
    def peak_bytes(self) -> int:
        """The most memory in use since ``reset_peak``."""
        return self.slabs.peak_bytes + self.blocks.peak_bytes

    @property
    def room_bytes(self) -> int:
        """How much the blocks hold together."""
        return self.blocks.buffer_bytes * (self.blocks.most or _MOST_BLOCKS)

    def reset_peak(self) -> None:
        """Start to count the peak anew."""
        self.slabs.reset_peak()
        self.blocks.reset_peak()


def make_pools(budget_bytes: int | None) -> Pools:
    """Return pools that stay within a budget together; with None, slabs hold whatever is staged."""
    pinned = torch.cuda.is_available()
    if budget_bytes is None:
        return Pools(BufferPool(_SLAB_BYTES, None, pinned=pinned), BufferPool(_BLOCK_BYTES, _MOST_BLOCKS))
    block_bytes = min(_BLOCK_BYTES, budget_bytes // 8)
    num_blocks = max(_FEWEST_BLOCKS, min(_MOST_BLOCKS, budget_bytes // 2 // block_bytes))
    slab_bytes = min(_SLAB_BYTES, budget_bytes // 8)
    num_slabs = (budget_bytes - num_blocks * block_bytes) // slab_bytes
    return Pools(BufferPool(slab_bytes, num_slabs, pinned=pinned), BufferPool(block_bytes, num_blocks))
