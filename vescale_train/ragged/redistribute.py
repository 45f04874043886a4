"""Redistribution of ``DTensor`` to, from and between ragged shards, so that torch's own methods do it.

``DTensor.redistribute``, ``full_tensor`` and their backward work as for any placement once this is installed. One axis
that changes is one exchange; what changes several axes goes over Replicate on the ragged one.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_ckpt.layout import placement as placements
from vescale_ckpt.layout.layout import Layout, local_shape
from vescale_ckpt.layout.mesh import coordinates
from vescale_train.comm import reduce_scatter_uneven
from vescale_train.errors import LayoutError
from vescale_train.ragged.placement import RaggedShard
from vescale_train.ragged.transfer import transfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    Move = Callable[[torch.Tensor, tuple[Placement, ...], tuple[Placement, ...]], torch.Tensor]


def ragged_axis(cuts: tuple[Placement, ...]) -> int | None:
    """Return the mesh axis with a ragged shard, None if there is none.

    Raises:
        LayoutError: there are two.
    """
    found = [axis for axis, placement in enumerate(cuts) if isinstance(placement, RaggedShard)]
    if len(found) > 1:
        raise LayoutError(f"cannot lay out {cuts}: a tensor has one ragged axis at most; flatten the axes into one")
    return found[0] if found else None


def local_shape_of(shape: tuple[int, ...], mesh: DeviceMesh, cuts: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the shape of this rank's local tensor under placements with a ragged one among them.

    Raises:
        LayoutError: the placements do not fit the shape.
    """
    axis = ragged_axis(cuts)
    if axis is None:
        raise LayoutError(f"{cuts} has no ragged shard")
    rest = left_by_others(shape, mesh, cuts, axis)
    layout = Layout((mesh.size(axis),), (_ours(cuts[axis]),))
    return local_shape(layout, rest, (mesh.get_local_rank(axis),))


def redistribute_local(
    local: torch.Tensor,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    move: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    torch_move: Move,
) -> torch.Tensor:
    """Return the local tensor under other placements, where the old or the new ones have a ragged shard.

    Args:
        local: under the old placements.
        shape: of the whole tensor.
        mesh: of both.
        move: (old, new) placements.
        torch_move: torch's own redistribution between placements without a ragged shard.

    Raises:
        LayoutError: placements that do not fit the shape, on all ranks alike, or a sum that cannot be made.
    """
    old, new = move
    before, after = ragged_axis(old), ragged_axis(new)
    for cuts, axis in ((old, before), (new, after)):
        if axis is not None:
            _check(shape, mesh, cuts, axis)
    axis = before if before is not None else after
    if axis is None or old == new:
        return local
    if _is_one_step(old, new, axis):
        return _along(local, shape, mesh, (old, new), axis)
    if before is not None:
        whole = _replaced(old, before, Replicate())
        local, old = _along(local, shape, mesh, (old, whole), before), whole
    goal = new if after is None else _replaced(new, after, Replicate())
    if old != goal:
        local = torch_move(local, old, goal)
    return local if after is None else _along(local, shape, mesh, (goal, new), after)


def left_by_others(shape: tuple[int, ...], mesh: DeviceMesh, cuts: tuple[Placement, ...], axis: int) -> tuple[int, ...]:
    """Return the shape of what the ranks along one axis hold together."""
    coordinate = mesh.get_coordinate()
    others = [i for i in range(mesh.ndim) if i != axis]
    layout = Layout(tuple(mesh.size(i) for i in others), tuple(_ours(cuts[i]) for i in others))
    return local_shape(layout, shape, tuple((coordinate or [0] * mesh.ndim)[i] for i in others))


def _is_one_step(old: tuple[Placement, ...], new: tuple[Placement, ...], axis: int) -> bool:
    """Return whether only this axis changes, and each rank along it holds a part of the same thing before and after."""
    others = [i for i in range(len(old)) if i != axis]
    cut = {p.dim for i in others if isinstance(p := new[i], Shard)}
    # with another axis on the same dim, which of them cuts first is not the same for a ragged shard
    is_apart = all(not isinstance(p, Shard) or p.dim not in cut for p in (old[axis], new[axis]))
    return is_apart and all(old[i] == new[i] for i in others)


def _along(
    local: torch.Tensor,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    move: tuple[tuple[Placement, ...], tuple[Placement, ...]],
    axis: int,
) -> torch.Tensor:
    """Change the placement of one axis."""
    source, target = move[0][axis], move[1][axis]
    group = mesh.get_group(axis)
    rest = left_by_others(shape, mesh, move[1], axis)
    if isinstance(source, Partial):
        return _reduce(local, rest, source, target, group)
    if isinstance(target, Partial):
        raise LayoutError(f"cannot make {source} a sum still to be made: redistribute it to Replicate or to a shard")
    return transfer(local, rest, _ours(source), _ours(target), group)


def _reduce(
    local: torch.Tensor, shape: tuple[int, ...], source: Partial, target: Placement, group: dist.ProcessGroup
) -> torch.Tensor:
    """Make a sum and cut it, by one reduce-scatter."""
    if source.reduce_op not in {"sum", "avg"} or not isinstance(target, RaggedShard):
        raise LayoutError(f"cannot redistribute {source} to {target}: only sums and means are made on the way")
    num = len(target.dims)
    rows = local.reshape(math.prod(shape[:num]), *shape[num:])
    each = len(rows) // sum(target.local_units)
    made = reduce_scatter_uneven(rows, [units * each for units in target.local_units], group)
    return made / dist.get_world_size(group) if source.reduce_op == "avg" else made


def _check(shape: tuple[int, ...], mesh: DeviceMesh, cuts: tuple[Placement, ...], axis: int) -> None:
    """Refuse a ragged shard that does not fit at some coordinate of the other axes, on all ranks alike."""
    ragged = cuts[axis]
    if isinstance(ragged, RaggedShard) and len(ragged.local_units) != mesh.size(axis):
        raise LayoutError(f"{ragged} is for {len(ragged.local_units)} ranks, the axis has {mesh.size(axis)}")
    others = [i for i in range(mesh.ndim) if i != axis]
    layout = Layout(tuple(mesh.size(i) for i in others), tuple(_ours(cuts[i]) for i in others))
    along = Layout((mesh.size(axis),), (_ours(ragged),))
    for rest in {local_shape(layout, shape, at) for at in coordinates(layout.mesh_shape)}:
        local_shape(along, rest, (0,))


def _ours(placement: Any) -> placements.Placement:
    """Return what the checkpoint's geometry calls a placement; a sum still to be made is held whole."""
    if isinstance(placement, RaggedShard):
        return placement.checkpoint_placement()
    if isinstance(placement, Shard):
        return placements.Shard(placement.dim)
    if isinstance(placement, Replicate | Partial):
        return placements.Replicate()
    raise LayoutError(f"cannot redistribute between a ragged shard and {placement}: go over Replicate")


def _replaced(cuts: tuple[Placement, ...], axis: int, placement: Placement) -> tuple[Placement, ...]:
    return (*cuts[:axis], placement, *cuts[axis + 1 :])
