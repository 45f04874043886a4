from __future__ import annotations

import uuid

import numpy as np
import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import ConfigError, LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.layout.placement import Replicate, Shard
from vescale_ckpt.plan.forecast import forecast_load
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.plan.read_share import share_reads


@pytest.fixture(scope="module")
def manifest():
    tied = torch.randn(512, 256)
    state = {"w": torch.randn(1024, 512), "t": tied, "u": tied, "b": torch.randn(7)}
    with vc.open_store(f"memory://{uuid.uuid4().hex}") as store:
        with vc.Checkpointer(store, "run") as checkpointer:
            checkpointer.save(1, state)
        return store["run@1"].manifest


def everywhere(manifest, *placements):
    return dict.fromkeys(range(len(manifest.tensors)), placements)


def test_one_rank_reads_all_of_it(manifest):
    found = forecast_load(manifest, (1,), everywhere(manifest, Replicate()))
    total = 1024 * 512 * 4 + 512 * 256 * 4 + 28
    assert found.stored_bytes == found.read_bytes == total
    assert found.ranks[0].held_bytes == total, "tied tensors count once"
    assert (found.exchanged_bytes, found.imbalance) == (0, 1.0)


def test_replicas_read_every_byte_once_and_exchange_the_rest(manifest):
    found = forecast_load(manifest, (4,), everywhere(manifest, Replicate()))
    total = found.stored_bytes
    assert found.read_bytes == total
    assert found.exchanged_bytes == 3 * total
    assert [rank.held_bytes for rank in found.ranks] == [total] * 4
    assert found.imbalance < 1.2


def test_shards_on_tile_lines_exchange_nothing(manifest):
    placements = everywhere(manifest, Replicate(), Shard(0))
    placements[manifest.find("b")] = (Replicate(), Replicate())
    found = forecast_load(manifest, (1, 2), placements)
    assert found.read_bytes == found.stored_bytes
    assert found.exchanged_bytes == 28
    assert [rank.coordinate for rank in found.ranks] == [(0, 0), (0, 1)]
    assert sum(rank.held_bytes for rank in found.ranks) == found.stored_bytes + 28
    boxes = [box for rank in found.held["w"] for box in rank]
    assert check_cover((1024, 512), boxes).ok
    assert found.held["b"] == ((Box((0,), (7,)),),) * 2


@pytest.fixture(scope="module")
def odd():
    """Return a manifest of which a tensor lies in chunks that are parts of tiles."""
    whole = torch.randn(1000, 300)
    pieces = [
        ((0, 0), whole[:333]),
        ((333, 0), whole[333:, :77].contiguous()),
        ((333, 77), whole[333:, 77:].contiguous()),
    ]
    with vc.open_store(f"memory://{uuid.uuid4().hex}") as store:
        with vc.Checkpointer(store, "run") as checkpointer:
            checkpointer.save(1, {"odd": vc.ShardedView((1000, 300), torch.float32, pieces), "w": torch.ones(2000, 90)})
        found = store["run@1"].manifest
    assert len(found.chunks.partial_row)
    return found


@pytest.mark.parametrize("which", ["manifest", "odd"])
def test_it_is_what_the_load_itself_plans(which, request):
    manifest = request.getfixturevalue(which)
    found = forecast_load(manifest, (2, 3), everywhere(manifest, Replicate(), Shard(0)))
    needed = []
    for rank in range(6):
        wants = [Want(t, box) for t, record in enumerate(manifest.tensors) for box in found.held[record.fqn][rank]]
        needed.append(np.array([need.row for need in chunks_needed(manifest, wants)], dtype=np.int64))
    for rank, forecast in enumerate(found.ranks):
        share = share_reads(manifest, needed, rank=rank, round_bytes=1 << 30)
        rows = np.flatnonzero(share.reader == rank)
        assert forecast.num_chunks == len(rows)
        assert forecast.read_bytes == manifest.chunks.length[rows].sum()


def test_a_part_of_the_tensors(manifest):
    found = forecast_load(manifest, (2,), {manifest.find("b"): (Shard(0),)})
    assert [rank.held_bytes for rank in found.ranks] == [16, 12]
    assert set(found.held) == {"b"}
    nothing = forecast_load(manifest, (2,), {})
    assert (nothing.read_bytes, nothing.imbalance) == (0, 1.0)


def test_many_ranks_at_once(manifest):
    found = forecast_load(manifest, (64, 8), everywhere(manifest, Replicate(), Shard(0)))
    assert len(found.ranks) == 512
    assert found.read_bytes == found.stored_bytes


def test_what_does_not_fit(manifest):
    with pytest.raises(LayoutError):
        forecast_load(manifest, (2,), everywhere(manifest, Shard(5)))
    with pytest.raises(LayoutError):
        forecast_load(manifest, (2, 2), everywhere(manifest, Shard(0)))
    with pytest.raises(ConfigError, match="1000000 ranks"):
        forecast_load(manifest, (1000, 1000), {})
