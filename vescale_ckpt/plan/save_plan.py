"""The save plan: of all ranks' holdings, who writes which boxes, balanced by bytes.

Every rank makes the same plan from the same holdings, so nobody has to be told. Ranks that hold the same box are its
replicas: for each set of replicas, what they hold in common is laid end to end and cut so that the water level of
bytes rises evenly; a box at a cut is divided along the tile grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape
from vescale_ckpt.plan.rows import BoxRows, Groups, group_equal, water_levels
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.plan.holdings import LeafSpec
    from vescale_ckpt.state.tree import Path

_MOST_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor that this rank writes: all of its tiles, or some."""

    tensor: int
    """Index into ``SavePlan.tensors``."""
    box: Box
    tiles: tuple[int, ...] | None
    """Indexes in the tensor's tile grid of the parts to write; None for all that the box touches."""


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Who writes what; of the writing, only this rank's."""

    tensors: tuple[TensorRecord, ...]
    regions: tuple[Region, ...]
    """This rank's, by tensor."""
    compared: tuple[int, ...]
    """Tensors that this rank holds whole as one of several equal copies."""
    bytes_by_rank: npt.NDArray[np.int64]  # [world_size] bytes that each rank writes before dedup and codec


def merge_tables(tables: Sequence[tuple[Sequence[int], Sequence[LeafSpec]]]) -> tuple[LeafSpec, ...]:
    """Return every tensor once, in first-seen order.

    Args:
        tables: (ranks that sent it, specs) for each distinct table.

    Raises:
        MismatchError: ranks disagree on a tensor's dtype, shape, kind, holding or alias; lists all.
    """
    first: dict[Path, tuple[LeafSpec, int]] = {}
    problems: list[str] = []
    for ranks, specs in tables:
        for spec in specs:
            known, rank = first.setdefault(spec.path, (spec, ranks[0]))
            if known.abstains and not spec.abstains:
                first[spec.path] = (spec, ranks[0])
            vote = replace(spec, alias_of=known.alias_of) if known.abstains or spec.abstains else spec
            if replace(known, abstains=False) != replace(vote, abstains=False):
                problems.append(_disagreement(known, rank, spec, ranks[0]))
    if problems:
        raise MismatchError(
            f"cannot save: ranks disagree on {len(problems)} tensors - " + "; ".join(problems[:_MOST_PROBLEMS]),
            problems=tuple(problems),
        )
    return tuple(spec for spec, _ in first.values())


def make_save_plan(specs: Sequence[LeafSpec], rows: BoxRows, *, rank: int, world_size: int) -> SavePlan:
    """Return the plan for ``rank``.

    Args:
        specs: every tensor once (``merge_tables``); ``rows.tensor`` indexes it.
        rows: one row for each (rank, box) held.
        rank: whose regions to keep.
        world_size: number of ranks.

    Raises:
        MismatchError: an element is held by no rank, or by boxes that overlap without being equal.
    """
    index = {spec.path: i for i, spec in enumerate(specs)}
    tiles = {key: tile_shape(*key) for key in {(s.shape, s.item_bytes) for s in specs}}  # few shapes, many tensors
    records = tuple(
        TensorRecord(
            path=s.path,
            dtype=s.dtype,
            shape=s.shape,
            tile=tiles[s.shape, s.item_bytes],
            kind=s.kind,
            alias_of=None if s.alias_of is None else index[s.alias_of],
        )
        for s in specs
    )
    item_bytes = np.array([s.item_bytes for s in specs], dtype=np.int64)
    groups = group_equal(rows)
    _prove_cover(records, rows, groups)
    box_bytes = rows.volumes(groups.first) * item_bytes[groups.tensor]

    loads = np.zeros(world_size, dtype=np.int64)
    single = groups.size == 1
    np.add.at(loads, rows.rank[groups.first[single]], box_bytes[single])
    mine = [
        Region(int(rows.tensor[row]), rows.box(int(row)), None)
        for row in groups.first[single & (rows.rank[groups.first] == rank)]
    ]
    context = _Context(records, item_bytes, rows, groups, loads, rank)
    for members, chosen in groups.replica_sets(rows):
        mine += _share(members, chosen, box_bytes[chosen], context)
    mine.sort(key=lambda region: (region.tensor, region.box.offset))

    replicated = [s.holding == "replicated" and s.alias_of is None for s in specs]
    held = np.intersect1d(rows.tensor[rows.rank == rank], groups.tensor[groups.size > 1])
    compared = tuple(t for t in held.tolist() if replicated[t])
    return SavePlan(records, tuple(mine), compared, loads)


@dataclass(frozen=True, slots=True)
class _Context:
    """What sharing a replica set needs; ``loads`` is raised as it goes."""

    records: tuple[TensorRecord, ...]
    item_bytes: npt.NDArray[np.int64]
    rows: BoxRows
    groups: Groups
    loads: npt.NDArray[np.int64]
    rank: int
    cuts: dict[tuple[tuple[int, ...], tuple[int, ...], Box, int], _TileBytes] = field(default_factory=dict)
    """By shape, tile, box and item size: the many tensors of a model have few shapes."""


def _share(
    members: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], context: _Context
) -> list[Region]:
    """Divide the boxes of one replica set among its members; return this rank's part and raise the loads."""
    ends = np.cumsum(sizes)
    quota = np.cumsum(water_levels(context.loads[members], int(ends[-1])))
    starts = ends - sizes
    first = np.searchsorted(quota, starts, side="right")
    last = np.searchsorted(quota, np.maximum(ends - 1, starts), side="right")
    middle = np.minimum(np.searchsorted(quota, (starts + ends) // 2, side="right"), len(members) - 1)
    mine: list[Region] = []
    whole = first == last
    np.add.at(context.loads, members[middle[whole]], sizes[whole])
    mine += [_region(context, int(g), None) for g in chosen[whole & (members[middle] == context.rank)]]
    for g, start in zip(chosen[~whole], starts[~whole], strict=True):
        tiles = _cut(context, int(g), int(start), quota, members)
        if tiles:
            mine.append(_region(context, int(g), tiles))
    return mine


def _cut(
    context: _Context, group: int, start: int, quota: npt.NDArray[np.int64], members: npt.NDArray[np.int64]
) -> tuple[int, ...]:
    """Divide one box along its tiles, each to the member at whose share its middle lies; return this rank's tiles."""
    row = int(context.groups.first[group])
    tensor = int(context.rows.tensor[row])
    record, item_bytes = context.records[tensor], int(context.item_bytes[tensor])
    key = (record.shape, record.tile, context.rows.box(row), item_bytes)
    cuts = context.cuts.get(key)
    if cuts is None:
        cuts = context.cuts[key] = _TileBytes.of(*key)
    at = np.minimum(np.searchsorted(quota, start + cuts.middles, side="right"), len(members) - 1)
    np.add.at(context.loads, members[at], cuts.sizes)
    return tuple(cuts.indexes[members[at] == context.rank].tolist())


@dataclass(frozen=True, slots=True)
class _TileBytes:
    """The tiles of a box, laid end to end."""

    indexes: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    """Bytes of each tile's part of the box."""
    middles: npt.NDArray[np.int64]
    """The byte in the middle of each."""

    @classmethod
    def of(cls, shape: tuple[int, ...], tile: tuple[int, ...], box: Box, item_bytes: int) -> _TileBytes:
        cuts = TileGrid(shape, tile).cut_columns(box)
        sizes = cuts.sizes.prod(axis=1) * item_bytes
        return cls(cuts.indexes, sizes, np.cumsum(sizes) - sizes + sizes // 2)


def _region(context: _Context, group: int, tiles: tuple[int, ...] | None) -> Region:
    row = int(context.groups.first[group])
    return Region(int(context.rows.tensor[row]), context.rows.box(row), tiles)


def _prove_cover(records: tuple[TensorRecord, ...], rows: BoxRows, groups: Groups) -> None:
    """Refuse a state in which an element is held by nobody or by boxes that overlap without being equal."""
    held = np.zeros(len(records), dtype=np.int64)
    if groups.tensor.size:
        heads = np.flatnonzero(np.diff(groups.tensor, prepend=-1))
        held[groups.tensor[heads]] = np.add.reduceat(rows.volumes(groups.first), heads)
    problems: list[str] = []
    sums_wrong = [i for i, r in enumerate(records) if r.alias_of is None and held[i] != math.prod(r.shape)]
    suspects = sorted({*sums_wrong, *(t for t in _not_cells(rows, groups) if _overlaps(rows, groups, t))})
    for tensor in suspects:
        boxes_at = groups.first[rows.tensor[groups.first] == tensor]
        boxes = [rows.box(int(row)) for row in boxes_at]
        report = check_cover(records[tensor].shape, boxes)
        name = fqn(records[tensor].path)
        problems += [f"'{name}' {box}: held by no rank" for box in report.missing[:4]]
        problems += [
            f"'{name}': rank {rows.rank[boxes_at[a]]} holds {boxes[a]} and rank {rows.rank[boxes_at[b]]} holds "
            f"{boxes[b]}, which overlap without being equal"
            for a, b in report.overlaps[:4]
        ]
    if problems:
        raise MismatchError(
            f"cannot save: {len(problems)} places of global shapes are not held exactly once - "
            + "; ".join(problems[:_MOST_PROBLEMS])
            + " - state the global shape and offsets that the ranks really hold",
            problems=tuple(problems),
        )


def _not_cells(rows: BoxRows, groups: Groups) -> list[int]:
    """Return the tensors whose distinct boxes are not cells of a grid; all others' cannot overlap.

    Cells of a grid have, in every dim, intervals that are equal or disjoint, and two cells that differ, differ in some
    dim. It is enough to compare neighbours in the order of their starts.
    """
    suspicious: set[int] = set()
    head = groups.first[np.searchsorted(groups.tensor, groups.tensor)]
    for dim in range(rows.offset.shape[1]):
        begin, size = rows.offset[groups.first, dim], rows.size[groups.first, dim]
        if bool(((begin == rows.offset[head, dim]) & (size == rows.size[head, dim])).all()):
            continue  # this dim is cut nowhere
        tensor, end = groups.tensor, begin + size
        if dim > 0:  # the groups are in order of the first dim's starts already
            order = np.lexsort([begin, tensor])
            tensor, begin, end = tensor[order], begin[order], end[order]
        meet = (tensor[1:] == tensor[:-1]) & (begin[1:] < end[:-1])
        meet &= (begin[1:] != begin[:-1]) | (end[1:] != end[:-1])
        suspicious.update(tensor[1:][meet].tolist())
    return sorted(suspicious)


def _overlaps(rows: BoxRows, groups: Groups, tensor: int) -> bool:
    """Return whether distinct boxes of one tensor overlap, proved box by box."""
    at = groups.first[groups.slice_of(tensor)]
    end = rows.offset[at] + rows.size[at]
    whole = tuple(int(n) for n in end.max(axis=0)[: rows.ndim_of(tensor)])
    return bool(check_cover(whole, [rows.box(int(row)) for row in at]).overlaps)


def _disagreement(a: LeafSpec, rank_a: int, b: LeafSpec, rank_b: int) -> str:
    names = [n for n in ("dtype", "shape", "kind", "holding", "alias_of") if getattr(a, n) != getattr(b, n)]
    detail = ", ".join(f"{n} {getattr(a, n)} on rank {rank_a} against {getattr(b, n)} on rank {rank_b}" for n in names)
    return f"'{fqn(a.path)}': {detail}"
