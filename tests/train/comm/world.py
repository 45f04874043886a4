"""What ranks do in the tests of the collectives; one world of a size does all of it."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from vescale_train import comm, emulate
from vescale_train.errors import LayoutError, RankFailureError, StateError


def units(num_units, numel, dtype=torch.float32):
    """Return units whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(num_units * 1000 + numel)
    scale = 10.0 ** torch.randint(-3, 4, (num_units, 1), generator=generator)
    return list((torch.randn(num_units, numel, generator=generator) * scale).to(dtype))


def check() -> dict[str, int]:
    """Run every check among the first 2, 3, ... of the ranks; return how many cases of each there were."""
    done = Counter()
    for num_ranks in range(1, dist.get_world_size() + 1):
        group = dist.new_group(list(range(num_ranks)))
        if dist.get_rank() < num_ranks:
            for body in (gathers, scatters, sums, refusals, emulated):
                done[f"{body.__name__} over {num_ranks}"] += body(group, dist.get_rank(), num_ranks)
    return dict(done)


def gathers(group, rank, num_ranks) -> int:
    count = 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for sizes in ([3] * num_ranks, list(range(num_ranks)), [0] * (num_ranks - 1) + [5], [0] * num_ranks):
            for dim in (0, 1, -1):
                whole = (torch.arange(2 * sum(sizes)) % 251).to(dtype).reshape(2, -1)
                whole = whole if dim else whole.t()
                mine = whole.split(sizes, dim)[rank]
                for known in (None, sizes):
                    assert torch.equal(comm.gather_uneven(mine, group, dim=dim, sizes=known), whole), (
                        dtype,
                        sizes,
                        dim,
                    )
                    count += 1
    return count


def scatters(group, rank, num_ranks) -> int:
    for dim in (0, 1):
        for sizes in (list(range(num_ranks)), [2] * num_ranks, [0] * num_ranks):
            whole = torch.arange(float(3 * sum(sizes))).reshape((sum(sizes), 3) if dim == 0 else (3, sum(sizes)))
            kept = comm.reduce_scatter_uneven(whole * (rank + 1), sizes, group, dim=dim)
            factor = num_ranks * (num_ranks + 1) / 2
            assert torch.equal(kept, whole.split(sizes, dim)[rank] * factor)
    return 6


def sums(group, rank, num_ranks) -> int:
    """Every number of units, of elements and of ranks gives what one process alone gives."""
    count = 0
    for dtype in (torch.float32, torch.bfloat16):
        for num_units in (1, 3, 4, 8, 13):
            for numel in (1, 5, 64):
                values = units(num_units, numel, dtype)
                want = comm.tree_sum(values)
                adder, again = comm.TreeSum(num_units), comm.TreeSum(num_units)
                for index in comm.units_of(rank, num_ranks, num_units):
                    adder.add(index, values[index].clone())
                    again.add(index, values[index].clone())
                assert torch.equal(comm.canonical_all_reduce(adder, group, like=values[0]), want)
                few = numel // num_ranks // 2
                sizes = [numel - (num_ranks - 1) * few, *[few] * (num_ranks - 1)]
                kept = comm.canonical_reduce_scatter(again, group, sizes=sizes, like=values[0])
                assert torch.equal(kept, want.split(sizes)[rank])
                count += 1
    return count


def refusals(group, rank, num_ranks) -> int:
    """Each of these is found before anything is sent, on every rank."""
    empty, ones = comm.TreeSum(2 * num_ranks), [1] * num_ranks
    with pytest.raises(StateError, match="to tell shape and dtype from"):
        comm.canonical_all_reduce(empty, group)
    with pytest.raises(StateError, match="which make the subtrees"):
        comm.canonical_reduce_scatter(empty, group, like=torch.ones(3))
    with pytest.raises(LayoutError, match=f"rank {rank} holds 2"):
        comm.gather_uneven(torch.ones(2), group, sizes=ones)
    with pytest.raises(LayoutError, match="cannot scatter dim 0"):
        comm.reduce_scatter_uneven(torch.ones(7), ones, group)
    return 4


def emulated(group, rank, num_ranks) -> int:
    """The emulator gives gloo's bits."""
    if num_ranks == 1:
        return 1
    count = 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel in (1, 2, 3, 7, num_ranks, 97, 1000, 4096, 100_003, *((700_001, 2_200_000) if count < 9 else ())):
            values = units(num_ranks, numel, dtype)
            got = values[rank].clone()
            dist.all_reduce(got, group=group)
            want = emulate.all_reduce(values)
            assert torch.equal(got, want), f"{dtype} {numel}: {(got != want).sum()} differ"
            count += 1
    for rows in (1, 3, 500, 20_000):
        values = [v.reshape(-1, 3) for v in units(num_ranks, rows * num_ranks * 3)]
        kept = torch.empty(rows, 3)
        dist.reduce_scatter_single(kept, values[rank].clone(), group=group)
        assert torch.equal(kept, emulate.reduce_scatter(values, rank)), rows
        count += 1
    return count


def late() -> list:
    """The last rank does not come to the second phase; the others say so."""
    group = dist.new_group()
    with comm.deadline("first", 20.0, group):
        dist.barrier(group)
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(2.0)
        return []
    try:
        with comm.deadline("second", 0.5, group):
            comm.gather_uneven(torch.ones(2), group, sizes=[2] * dist.get_world_size())
    except RankFailureError as error:
        return [str(error), error.context["phase"], sorted(error.failures), list(error.failures.values())]
    return ["nothing was raised"]
