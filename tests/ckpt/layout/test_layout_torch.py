"""Layouts against torch's own DTensor: simulated ranks in one process, and FSDP2 over tensor parallelism in several."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_ckpt.layout.layout import Layout, _decode_order, local_shape, spans
from vescale_ckpt.layout.mesh import coordinates
from vescale_ckpt.layout.placement import Placement, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh

CHOICES = [Replicate(), Shard(0), Shard(-1), StridedShard(0, 2), StridedShard(-2, 3), StridedShard(1, 2)]
MESHES = [(1,), (5,), (2, 3), (4, 2), (2, 1, 3), (2, 2, 2)]
SHAPES = [(12, 4), (13, 5), (2, 3), (0, 4)]


def all_placements(num_axes: int) -> list[tuple[Placement, ...]]:
    return list(itertools.product(CHOICES if num_axes < 3 else CHOICES[:5], repeat=num_axes))


def as_torch(placements: tuple[Placement, ...], ndim: int) -> list:
    def one(placement: Placement):
        match placement:
            case Shard(dim=dim):
                return TorchShard(dim % ndim)
            case StridedShard(dim=dim, split_factor=factor):
                return _StridedShard(dim % ndim, split_factor=factor)
            case _:
                return TorchReplicate()

    return [one(p) for p in placements]


def as_local(layout: Layout, whole: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
    """Return the local tensor that the spans say."""
    shape = tuple(whole.shape)
    local = torch.full(local_shape(layout, shape, coordinate), -1.0)
    for span in spans(layout, shape, coordinate):
        assert span.view_shape == tuple(local.shape)
        local[span.local.slices] = whole[span.box.slices]
    assert (local >= 0).all()
    return local


@contextlib.contextmanager
def simulated(mesh_shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Give a mesh whose ranks all live in this process."""
    num = math.prod(mesh_shape)
    dist.init_process_group("fake", rank=0, world_size=num, store=FakeStore())
    try:
        with LocalTensorMode(num):
            yield init_device_mesh("cpu", mesh_shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mesh_shape", MESHES)
def test_shapes_and_offsets_are_those_of_torch(mesh_shape, shape) -> None:
    for placements in all_placements(len(mesh_shape)):
        layout = Layout(mesh_shape, placements, order=tuple(range(len(mesh_shape))))
        for coordinate in coordinates(mesh_shape):
            theirs = _compute_local_shape_and_global_offset(
                shape, mesh_shape, list(coordinate), as_torch(placements, len(shape))
            )
            assert local_shape(layout, shape, coordinate) == theirs[0]
            if ours := spans(layout, shape, coordinate):
                assert ours[0].box.offset == theirs[1]


@pytest.mark.parametrize("mesh_shape", [(5,), (3, 2)])
def test_local_tensors_are_those_of_distribute_tensor(mesh_shape) -> None:
    with simulated(mesh_shape) as mesh:
        for shape, placements in itertools.product([(13, 5)], all_placements(len(mesh_shape))):
            whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
            layout = Layout(mesh_shape, placements, order=tuple(range(len(mesh_shape))))
            theirs = distribute_tensor(whole, mesh, as_torch(placements, 2), src_data_rank=None).to_local()
            for rank, coordinate in enumerate(coordinates(mesh_shape)):
                assert torch.equal(as_local(layout, whole, coordinate), theirs._local_tensors[rank])


@pytest.mark.parametrize("mesh_shape", [(3, 2), (2, 3), (2, 2, 2), (2, 1, 3), (2, 3, 2)])
def test_split_factors_tell_the_order_that_torch_wrote_them_for(mesh_shape) -> None:
    axes = range(len(mesh_shape))
    with simulated(mesh_shape) as mesh:
        for dims, order in itertools.product(itertools.product((0, 1), repeat=len(axes)), itertools.permutations(axes)):
            by_dim = [(d, tuple(axis for axis in order if dims[axis] == d)) for d in sorted(set(dims))]
            written = DTensorSpec._convert_shard_order_to_StridedShard(
                tuple(ShardOrderEntry(d, entry) for d, entry in by_dim), tuple(TorchShard(d) for d in dims), mesh
            )
            placements = tuple(
                StridedShard(p.dim, p.split_factor) if isinstance(p, _StridedShard) else Shard(p.dim) for p in written
            )
            read, meant = Layout(mesh_shape, placements), Layout(mesh_shape, tuple(map(Shard, dims)), order=order)
            for shape, coordinate in itertools.product([(13, 11), (5, 30)], coordinates(mesh_shape)):
                assert spans(read, shape, coordinate) == spans(meant, shape, coordinate)


def torch_can_gather(layout: Layout) -> bool:
    """Return whether torch gathers what its own ``distribute_tensor`` makes of these placements.

    Where the split factors tell no order and two axes cut one dim it returns other values, raises or hangs, even for a
    tensor that divides evenly.
    """
    dims = [p.dim % 2 for p in layout.placements if not isinstance(p, Replicate)]
    strided = any(isinstance(p, StridedShard) for p in layout.placements)
    return not strided or len(set(dims)) == len(dims) or _decode_order(layout, 2) is not None


def _gather_with_torch(mesh_shape: tuple[int, ...]) -> None:
    """Assert that torch makes the whole tensor of our local tensors, uneven and empty ones, too."""
    mesh = init_device_mesh("cpu", mesh_shape)
    coordinate = tuple(mesh.get_coordinate())
    for shape, placements in itertools.product([(13, 3), (2, 5)], all_placements(len(mesh_shape))):
        if not torch_can_gather(Layout(mesh_shape, placements)):
            continue
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        local = as_local(Layout(mesh_shape, placements), whole, coordinate)
        theirs = as_torch(placements, 2)
        tensor = DTensor.from_local(local, mesh, theirs, run_check=False, shape=whole.shape, stride=whole.stride())
        assert torch.equal(tensor.full_tensor(), whole), (shape, placements)


def _fsdp2_over_tensor_parallelism() -> None:
    """Assert that we know what FSDP2 holds; 7 and 13 rows are where that is not the letter of its placements."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Module()
    wholes = {f"w{size}": torch.arange(size * 2.0).view(size, 2) for size in (12, 7, 13, 1, 5)}
    for name, whole in wholes.items():
        module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [TorchShard(0)])))
    fully_shard(module, mesh=mesh["dp"])
    layout = Layout((3, 2), (StridedShard(0, 2), Shard(0)))
    for name, whole in wholes.items():
        tensor = getattr(module, name).detach()
        assert str(tensor.placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
        ours = as_local(layout, whole, tuple(tensor.device_mesh.get_coordinate()))
        assert torch.equal(tensor.to_local(), ours), (name, tensor.to_local(), ours)
        assert torch.equal(tensor.full_tensor(), whole), name


def _six_ranks(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo", rank=rank, world_size=6, init_method=f"file://{file}")
    try:
        _fsdp2_over_tensor_parallelism()
        for mesh_shape in [(6,), (3, 2)]:
            _gather_with_torch(mesh_shape)
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_six_ranks_hold_and_gather_what_we_say(tmp_path) -> None:
    torch.multiprocessing.spawn(_six_ranks, (str(tmp_path / "store"),), nprocs=6)
