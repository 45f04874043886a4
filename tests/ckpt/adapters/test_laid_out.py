from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.errors import LayoutError
from vescale_ckpt.layout.layout import Layout, local_shape
from vescale_ckpt.layout.mesh import coordinates
from vescale_ckpt.layout.placement import Flat, Interleaved, Shard
from vescale_ckpt.state.sharded_view import ShardedView


def test_sections_cut_by_themselves_are_stored_in_order_and_cut_again_otherwise(memory):
    """[W; V] of 16 rows, held per rank as [W_t; V_t] and cut again over dp."""
    full = torch.cat([torch.arange(24.0), torch.arange(1000.0, 1024.0)]).reshape(16, 3)
    saved = Layout((2, 2), (Shard(0), Interleaved(0, (8, 8))), order=(1, 0))
    locals_ = {at: torch.zeros(local_shape(saved, (16, 3), at)) for at in coordinates((2, 2))}
    stored = memory.save({"w": full})
    for rank, at in enumerate(coordinates((2, 2))):
        memory.load(stored, {"w": ShardedView.laid_out(locals_[at], (16, 3), saved, at)}, rank=rank, world_size=4)
    assert locals_[0, 0][:, 0].tolist() == [0.0, 3.0, 6.0, 9.0]
    assert locals_[1, 0][:, 0].tolist() == [1000.0, 1003.0, 1006.0, 1009.0]
    again = memory.store({
        rank: capture({"w": ShardedView.laid_out(locals_[at], (16, 3), saved, at)}, rank=rank)
        for rank, at in enumerate(coordinates((2, 2)))
    })  # fmt: skip
    assert torch.equal(again.full["w",], full)


def test_a_flat_bucket_without_its_padding(memory):
    """Parameters of 7, 1, 30 and 3 elements in a bucket padded to 48, over two ranks, then over three."""
    numels, full = (7, 1, 30, 3), [torch.arange(float(n)) + 100 * n for n in (7, 1, 30, 3)]
    starts = [sum(numels[:i]) for i in range(4)]

    def states(world_size, buckets):
        for rank in range(world_size):
            views = {}
            for i, numel in enumerate(numels):
                flat = Flat.in_bucket(starts[i], numel, 48 // world_size, world_size)
                start, stop = flat.ranges[rank]
                at = max(starts[i] - rank * (48 // world_size), 0)
                local = buckets[rank][at : at + stop - start]
                views[str(i)] = ShardedView.laid_out(local, (numel,), Layout((world_size,), (flat,)), (rank,))
            yield rank, views

    two = torch.cat([*full, torch.full((7,), -1.0)]).reshape(2, 24)
    stored = memory.store({rank: capture(state, rank=rank) for rank, state in states(2, two)})
    assert all(torch.equal(stored.full[str(i),], value) for i, value in enumerate(full))
    three = torch.full((3, 16), -5.0)
    for rank, state in states(3, three):
        memory.load(stored, state, rank=rank, world_size=3)
    assert torch.equal(three.reshape(-1)[:41], torch.cat(full))
    assert (three.reshape(-1)[41:] == -5.0).all()


def test_a_local_tensor_of_another_shape_is_refused():
    with pytest.raises(LayoutError, match=r"\(2, 3\).*\(3, 3\)"):
        ShardedView.laid_out(nn.Parameter(torch.zeros(3, 3)), (4, 3), Layout((2,), (Shard(0),)), (0,))
