"""The private names of torch, one by one: a new version that changes one fails here first."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_train import torch_private


@pytest.fixture
def mesh():
    """A mesh of four ranks that do not talk."""
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.distributed.destroy_process_group()


def test_every_name_is_there():
    assert all(hasattr(torch_private, name) for name in torch_private.__all__)


def test_a_callback_comes_once_when_all_gradients_are_there():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen = []

    def first(_):
        if not seen:
            seen.append("first")
            torch_private.on_backward_end(lambda: seen.append([p.grad is not None for p in layers.parameters()]))

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(first)
    layers(torch.ones(1, 2)).sum().backward()
    assert seen == ["first", [True] * 4]


def test_a_dtensor_moves_to_other_memory(mesh):
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh["tp"], [Shard(0)], run_check=False)
    memory = torch.ones(2, 2)
    torch_private.set_local(tensor, memory)
    memory[0, 0] = 5
    assert tensor.to_local()[0, 0] == 5
    assert (tensor + 1).to_local()[0, 0] == 6


def test_a_flattened_mesh_and_the_mesh_it_came_from(mesh):
    flat = torch_private.flatten_mesh(mesh["dp", "tp"], "all")
    assert flat.ndim == 1
    assert flat.size() == 4
    assert torch_private.root_mesh(mesh["tp"]) is mesh


def test_redistribution_and_operations_are_torchs_own_where_no_placement_of_ours_is(mesh):
    import vescale_train.ragged  # noqa: F401, PLC0415 - it extends both

    line = mesh["tp"]
    tensor = DTensor.from_local(torch.ones(4, 2), line, [Replicate()], run_check=False)
    cut = tensor.redistribute(line, [Shard(0)])
    assert cut.to_local().shape == (2, 2)
    assert (cut.sum() * 2).placements[0].is_partial()
    assert (cut + cut).placements == (Shard(0),)


def test_every_slice_of_a_mesh_and_an_interleaved_cut(mesh):
    assert [one.mesh.tolist() for one in torch_private.all_submeshes(mesh, "tp")] == [[0, 1], [2, 3]]
    cut = torch_private.StridedShard(0, split_factor=3)
    assert cut.split_factor == 3
    assert cut.dim == 0
    tensor = DTensor.from_local(torch.zeros(6), mesh["tp"], [cut], run_check=False)
    assert tensor.view(1, 12).placements == (torch_private.StridedShard(1, split_factor=3),)


def test_modes_that_see_functions_are_listed_and_kept_out():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode() as mode:
        assert torch_private.function_modes()[-1] is mode
        torch.ones(1)
        with torch_private.no_torch_function():
            torch.zeros(1)
    assert seen == ["ones"]
    assert mode not in torch_private.function_modes()
