"""Inputs of the cases: tensors whose every element tells its place, and what a rank of a layout holds of them."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from tests.properties.test_layouts import slow_local
from vescale_ckpt.state.sharded_view import ShardedView

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vescale_ckpt.layout.layout import Layout


def tagged(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Return a tensor of which no two elements are equal, as far as the dtype can count."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) + start).reshape(shape).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal dtype, shape and bytes."""
    return a.dtype == b.dtype and tuple(a.shape) == tuple(b.shape) and torch.equal(bits(a), bits(b))


def local_of(full: torch.Tensor, layout: Layout, at: Sequence[int]) -> torch.Tensor:
    """Return the local tensor at a coordinate: cut placement by placement, not by the library's boxes."""
    ids = torch.from_numpy(slow_local(layout, tuple(full.shape), tuple(at)))
    return full.reshape(-1)[ids.reshape(-1)].reshape(ids.shape).clone()


def view_at(full: torch.Tensor, layout: Layout, at: Sequence[int]) -> ShardedView:
    """Return what a rank at a coordinate passes to save ``full`` under a layout."""
    return ShardedView.laid_out(local_of(full, layout, at), tuple(full.shape), layout, tuple(at))


def blank_at(full: torch.Tensor, layout: Layout, at: Sequence[int]) -> tuple[torch.Tensor, ShardedView]:
    """Return (local memory, view of it) to load ``full`` into under a layout; every bit of it is wrong."""
    local = local_of(full, layout, at)
    spoil(local)
    return local, ShardedView.laid_out(local, tuple(full.shape), layout, tuple(at))


def spoil(tensor: torch.Tensor) -> None:
    """Invert every bit of a contiguous tensor, in place."""
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).bitwise_not_()


def coordinate_of(layout: Layout, rank: int) -> tuple[int, ...] | None:
    """Return the coordinate of a rank, row-major; None where the mesh is smaller than the world."""
    return next(itertools.islice(itertools.product(*map(range, layout.mesh_shape)), rank, None), None)


def chunks(size: int, world_size: int) -> list[tuple[int, int]]:
    """Return (start, length) of every rank's part by ``torch.chunk``'s rule."""
    step = -(-size // world_size)
    return [(min(r * step, size), min(step, max(0, size - r * step))) for r in range(world_size)]


def bag(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module that holds tensors under dotted names, as a stage of a pipeline holds some of a model's."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *above, last = name.split(".")
        module = root
        for part in above:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    return root


def leaves(state: object, path: tuple = ()) -> Iterator[tuple[tuple, object]]:
    """Yield (path, value) of all that is no container."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from leaves(value, (*path, index))
    else:
        yield path, state


def assert_same(one: object, other: object) -> None:
    """Require equal containers, types, values and bytes."""
    first, second = list(leaves(one)), list(leaves(other))
    assert [path for path, _ in first] == [path for path, _ in second]
    for (path, a), (_, b) in zip(first, second, strict=True):
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor), path
            assert same_bits(a, b), path
        else:
            assert type(a) is type(b), path
            assert repr(a) == repr(b), path
