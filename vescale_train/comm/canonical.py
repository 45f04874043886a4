"""Sums over ranks whose bits do not depend on how many ranks there are.

Subtrees of the fixed tree (``comm.tree``) cross between the ranks unadded, each rank adds up its own slice of all of
them, and slices are gathered. With one subtree a rank, as powers of two give, that is the traffic of a ring all-reduce.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from vescale_train.comm.tree import TreeSum, nodes_of, sum_nodes, units_of
from vescale_train.comm.uneven import exchange, gather_uneven
from vescale_train.errors import LayoutError, StateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from vescale_train.comm.tree import Node


def canonical_reduce_scatter(
    units: TreeSum,
    group: ProcessGroup | None = None,
    *,
    sizes: Sequence[int] | None = None,
    like: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return this rank's slice (1-D) of the flattened sum of all units of all ranks.

    Args:
        units: What this rank added: the units ``units_of(rank, num_ranks, num_units)``. It is used up.
        group: The ranks that share the units.
        sizes: Elements that each rank keeps; by default as even as can be.
        like: Gives shape and dtype to a rank that has no unit, which is one of more ranks than units.

    Raises:
        StateError: a unit of this rank was not added, or it has none and ``like`` is not given.
        LayoutError: the sizes do not cover the tensor.
    """
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = _own_nodes(units, rank, num_ranks)
    like = _example(mine, like, rank)
    numel = like.numel()
    sizes = even_sizes(numel, num_ranks) if sizes is None else tuple(sizes)
    if len(sizes) != num_ranks or sum(sizes) != numel:
        raise LayoutError(f"cannot share {numel} elements out over {num_ranks} ranks by sizes {sizes}")
    theirs = [nodes_of(units_of(r, num_ranks, units.num_units), units.num_units) for r in range(num_ranks)]
    if num_ranks == 1:
        return units.total().reshape(-1)
    empty = like.new_empty(0)
    flat = [subtotal.reshape(-1) for subtotal in mine.values()]
    bounds = pairwise(accumulate(sizes, initial=0))
    parts = [torch.cat([empty, *(subtotal[a:b] for subtotal in flat)]) for a, b in bounds]
    received = exchange(parts, [len(nodes) * sizes[rank] for nodes in theirs], group)
    subtotals = chain.from_iterable(
        part.view(len(nodes), sizes[rank]).unbind() for part, nodes in zip(received, theirs, strict=True)
    )
    return sum_nodes(zip(chain.from_iterable(theirs), subtotals, strict=True), units.num_units)


def canonical_all_reduce(
    units: TreeSum, group: ProcessGroup | None = None, *, like: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of all units of all ranks, in the shape of a unit: the same bits for any number of ranks.

    Raises:
        StateError: a unit of this rank was not added, or it has none and ``like`` is not given.
    """
    num_ranks = dist.get_world_size(group)
    like = _example(units.nodes(), like, dist.get_rank(group))
    sizes = even_sizes(like.numel(), num_ranks)
    own = canonical_reduce_scatter(units, group, sizes=sizes, like=like)
    return gather_uneven(own, group, sizes=sizes).reshape(like.shape)


def even_sizes(numel: int, num_ranks: int) -> tuple[int, ...]:
    """Return how many of ``numel`` elements each rank keeps when they are shared out as evenly as can be."""
    return tuple(len(units_of(rank, num_ranks, numel)) for rank in range(num_ranks))


def _example(nodes: dict[Node, torch.Tensor], like: torch.Tensor | None, rank: int) -> torch.Tensor:
    found = next(iter(nodes.values()), like)
    if found is None:
        raise StateError(f"rank {rank} has no unit to tell shape and dtype from: pass like=", rank=rank)
    return found


def _own_nodes(units: TreeSum, rank: int, num_ranks: int) -> dict[Node, torch.Tensor]:
    wanted = nodes_of(units_of(rank, num_ranks, units.num_units), units.num_units)
    found = units.nodes()
    if tuple(found) != wanted:
        raise StateError(
            f"rank {rank} of {num_ranks} must add the units {units_of(rank, num_ranks, units.num_units)} of "
            f"{units.num_units}, which make the subtrees {wanted}; it has {tuple(found)}",
            rank=rank,
        )
    return found
