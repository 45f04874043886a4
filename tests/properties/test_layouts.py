from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.flat import flat_to_boxes
from vescale_ckpt.layout.layout import Layout, Span, local_shape, spans
from vescale_ckpt.layout.mesh import coordinates
from vescale_ckpt.layout.placement import Boxes, Flat, Interleaved, Placement, Ragged, Replicate, Shard, StridedShard

shapes = st.lists(st.integers(0, 17), max_size=4).map(tuple)
meshes = st.lists(st.integers(1, 8), max_size=3).map(tuple).filter(lambda mesh: math.prod(mesh) <= 8)


@st.composite
def parts_of(draw: st.DrawFn, length: int, num: int) -> list[tuple[int, int]]:
    """Cut ``length`` into ``num`` ranges, some of which may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, length), min_size=num - 1, max_size=num - 1)))
    return list(itertools.pairwise([0, *cuts, length]))


@st.composite
def placements_for(
    draw: st.DrawFn, shape: tuple[int, ...], local: tuple[int, ...] | None, num: int, num_folded: int
) -> Placement:
    """Draw a placement of an axis of ``num``; ``local`` is what it cuts, or None if that differs between ranks."""
    free = list(range(num_folded, len(shape)))
    kinds = [st.just(Replicate())]
    if free:
        dim = draw(st.sampled_from(free))
        named = st.sampled_from([dim, dim - len(shape)])
        factor = st.integers(1, 4)
        groups = draw(parts_of(shape[dim], draw(st.integers(1, 4))))
        kinds += [
            st.builds(Shard, named),
            st.builds(StridedShard, named, factor),
            st.builds(Interleaved, named, st.just(tuple(b - a for a, b in groups))),
        ]
        if local is not None:
            at = dim if num_folded == 0 else dim - num_folded + 1
            sizes = tuple(b - a for a, b in draw(parts_of(local[at], num)))
            kinds.append(st.builds(Shard, named, st.just(sizes)))
    if local is not None:
        kinds.append(st.just(Flat(tuple(draw(parts_of(math.prod(local), num))))))
    if local is not None and shape and num_folded == 0:
        dims = tuple(range(draw(st.integers(1, len(shape)))))
        rows = math.prod(local[: len(dims)])
        kinds.append(st.just(Ragged(dims, tuple(b - a for a, b in draw(parts_of(rows, num)))) if rows else Replicate()))
        dim = draw(st.sampled_from(range(len(shape))))
        ranges = draw(parts_of(local[dim], num))
        kinds.append(
            st.just(
                Boxes(
                    tuple(
                        Box(
                            tuple(a if d == dim else 0 for d in range(len(shape))),
                            tuple(b - a if d == dim else n for d, n in enumerate(local)),
                        )
                        for a, b in ranges
                    )
                )
            )
        )
    return draw(st.one_of(kinds))


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """Draw a layout of any kinds that fit each other, applied in any order of the axes."""
    applied = draw(meshes)
    placements: list[Placement] = []
    num_folded = 0
    for axis, num in enumerate(applied):
        so_far = Layout(applied[:axis], tuple(placements), order=tuple(range(axis)))
        found = {local_shape(so_far, shape, c) for c in coordinates(so_far.mesh_shape)}
        local = found.pop() if len(found) == 1 else None
        placement = draw(placements_for(shape, local, num, num_folded))
        if isinstance(placement, Flat) and len(shape) != 1:
            num_folded = len(shape) or 1
        if isinstance(placement, Ragged) and len(placement.dims) > 1:
            num_folded = len(placement.dims)
        placements.append(placement)
    order = draw(st.permutations(range(len(applied))))
    mesh_shape, by_axis = [0] * len(applied), [Replicate()] * len(applied)
    for step, axis in enumerate(order):
        mesh_shape[axis], by_axis[axis] = applied[step], placements[step]
    return Layout(tuple(mesh_shape), tuple(by_axis), order=tuple(order))


def slow_local(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> np.ndarray:
    """Return the local tensor by cutting an array of element numbers, step by step."""
    ids = np.arange(math.prod(shape)).reshape(shape)
    # Which indexes of the whole tensor each dim still has; no longer kept for dims that were flattened.
    indexes = [np.arange(n) for n in shape]
    flattened = 1
    for axis in layout.order or range(len(layout.placements)):
        num, at, placement = layout.mesh_shape[axis], coordinate[axis], layout.placements[axis]
        match placement:
            case Shard() | StridedShard() | Interleaved():
                dim = placement.dim % len(shape)
                kept = _slow_shard(placement, indexes[dim], num, at)
                indexes[dim] = indexes[dim][kept]
                ids = np.take(ids, kept, axis=dim - flattened + 1)
            case Flat(ranges=ranges):
                ids = ids.reshape(-1)[slice(*ranges[at])]
                flattened = max(len(shape), 1)
                indexes[:1] = [index[slice(*ranges[at])] for index in indexes[:1]]
            case Ragged(dims=dims, local_units=units):
                rows = ids.reshape(math.prod(ids.shape[: len(dims)]), *ids.shape[len(dims) :])
                unit = len(rows) // sum(units)
                held = slice(sum(units[:at]) * unit, sum(units[: at + 1]) * unit)
                ids, indexes[0] = rows[held], indexes[0][held]
                flattened = len(dims)
            case Boxes(boxes=boxes):
                ids = ids[boxes[at].slices]
                indexes = [index[part] for index, part in zip(indexes, boxes[at].slices, strict=True)]
            case Replicate():
                pass
    return ids


def _slow_shard(placement, index: np.ndarray, num: int, at: int) -> np.ndarray:
    positions = np.arange(len(index))

    def chunk(part: np.ndarray, pieces: int) -> list[np.ndarray]:
        step = -(-len(part) // pieces)
        return [part[i * step : (i + 1) * step] for i in range(pieces)]

    match placement:
        case Shard(sizes=None):
            return chunk(positions, num)[at]
        case Shard(sizes=sizes):
            return positions[sum(sizes[:at]) : sum(sizes[: at + 1])]
        case StridedShard(split_factor=factor):
            return np.concatenate([chunk(section, num)[at] for section in chunk(positions, factor)])
        case Interleaved(groups=groups):
            ends = np.cumsum(groups)
            sections = [positions[(index >= end - n) & (index < end)] for n, end in zip(groups, ends, strict=True)]
            return np.concatenate([chunk(section, num)[at] for section in sections])


def local_values(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> np.ndarray:
    """Return the local tensor that the spans say; each of its elements must be in one span."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    local = np.full(local_shape(layout, shape, coordinate), -1)
    memory = local.reshape(-1)
    for span in spans(layout, shape, coordinate):
        assert span.box.volume
        view = memory[span.view_start : span.view_stop].reshape(span.view_shape)
        assert (view[span.local.slices] == -1).all()
        view[span.local.slices] = whole[span.box.slices]
    return local


def could_be_one(a: Span, b: Span) -> bool:
    """Return whether two spans touch in the tensor and, alike, in memory."""
    if (a.view_start, a.view_shape) != (b.view_start, b.view_shape):
        return False
    pairs = list(zip(a.box.offset, b.box.offset, a.box.shape, b.box.shape, a.local.offset, b.local.offset, strict=True))
    apart = [p for p in pairs if p[0] != p[1] or p[2] != p[3]]
    return len(apart) == 1 and apart[0][0] + apart[0][2] == apart[0][1] and apart[0][4] + apart[0][2] == apart[0][5]


@settings(max_examples=120, deadline=None)
@given(shapes, st.data())
def test_ranks_hold_every_element_once_and_where_the_spans_say(shape, data) -> None:
    layout = data.draw(layouts(shape))
    boxes = []
    for coordinate in coordinates(layout.mesh_shape):
        held = spans(layout, shape, coordinate)
        np.testing.assert_array_equal(
            local_values(layout, shape, coordinate), slow_local(layout, shape, coordinate), strict=True
        )
        assert not any(could_be_one(a, b) for a, b in itertools.permutations(held, 2))
        if layout.replica_of(coordinate) == coordinate:
            boxes += [span.box for span in held]
        else:
            assert held == spans(layout, shape, layout.replica_of(coordinate))
    assert check_cover(shape, boxes).ok


@settings(max_examples=100, deadline=None)
@given(shapes.filter(bool), st.data())
def test_split_factors_of_an_order_are_read_back(shape, data) -> None:
    mesh_shape = data.draw(meshes.filter(bool))
    axes = range(len(mesh_shape))
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in axes]
    order = tuple(data.draw(st.permutations(axes)))
    step = {axis: order.index(axis) for axis in axes}
    factors = [
        math.prod(mesh_shape[b] for b in axes if b > a and dims[b] == dims[a] and step[b] < step[a]) for a in axes
    ]
    written = tuple(Shard(d) if f == 1 else StridedShard(d, f) for d, f in zip(dims, factors, strict=True))
    meant = Layout(mesh_shape, tuple(map(Shard, dims)), order=order)
    for coordinate in coordinates(mesh_shape):
        assert spans(Layout(mesh_shape, written), shape, coordinate) == spans(meant, shape, coordinate)


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 8), st.integers(0, 50), st.data())
def test_a_bucket_shares_out_a_tensor_once(shape, num_shards, offset, data) -> None:
    numel = math.prod(shape)
    shard_numel = -(-(offset + numel + data.draw(st.integers(0, 9))) // num_shards)
    layout = Layout((num_shards,), (Flat.in_bucket(offset, numel, shard_numel, num_shards),))
    boxes = [span.box for i in range(num_shards) for span in spans(layout, shape, (i,))]
    assert check_cover(shape, boxes).ok
    start = 0
    for i in range(num_shards):
        stop = start + math.prod(local_shape(layout, shape, (i,)))
        assert [span.box for span in spans(layout, shape, (i,))] == flat_to_boxes(shape, start, stop)
        start = stop
