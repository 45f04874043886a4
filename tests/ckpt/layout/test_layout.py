from __future__ import annotations

import math

import numpy as np
import pytest

from vescale_ckpt.errors import LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.layout.layout import Layout, Span, local_shape, spans
from vescale_ckpt.layout.mesh import coordinates
from vescale_ckpt.layout.placement import Boxes, Flat, Interleaved, Ragged, Replicate, Shard, StridedShard


def local_values(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> np.ndarray:
    """Return the local tensor at a coordinate if the whole tensor counts its elements, made from the spans."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    local = np.full(local_shape(layout, shape, coordinate), -1)
    memory = local.reshape(-1)
    for span in spans(layout, shape, coordinate):
        view = memory[span.view_start : span.view_stop].reshape(span.view_shape)
        assert (view[span.local.slices] == -1).all()
        view[span.local.slices] = whole[span.box.slices]
    assert (local >= 0).all()
    return local


def check_partition(layout: Layout, shape: tuple[int, ...]) -> None:
    firsts = [c for c in coordinates(layout.mesh_shape) if layout.replica_of(c) == c]
    report = check_cover(shape, [span.box for c in firsts for span in spans(layout, shape, c)])
    assert report.ok, report
    for c in coordinates(layout.mesh_shape):
        assert spans(layout, shape, c) == spans(layout, shape, layout.replica_of(c))


def rows(layout: Layout, size: int) -> list[list[int]]:
    return [local_values(layout, (size,), c).tolist() for c in coordinates(layout.mesh_shape)]


def test_shard_is_torch_chunk() -> None:
    assert rows(Layout((4,), (Shard(0),)), 10) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert rows(Layout((4,), (Shard(0),)), 5) == [[0, 1], [2, 3], [4], []]
    assert rows(Layout((4,), (Shard(-1),)), 1) == [[0], [], [], []]
    assert local_shape(Layout((4,), (Shard(0),)), (5, 7), (3,)) == (0, 7)
    assert spans(Layout((4,), (Shard(0),)), (5, 7), (3,)) == ()


def test_shard_of_said_sizes() -> None:
    layout = Layout((4,), (Shard(0, sizes=(1, 4, 0, 2)),))
    assert rows(layout, 7) == [[0], [1, 2, 3, 4], [], [5, 6]]


def test_later_axes_cut_what_earlier_ones_left() -> None:
    assert rows(Layout((2, 2), (Shard(0), Shard(0))), 10) == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]]
    swapped = Layout((2, 2), (Shard(0), Shard(0)), order=(1, 0))
    assert rows(swapped, 10) == [[0, 1, 2], [5, 6, 7], [3, 4], [8, 9]]


def test_a_span_says_where_in_the_local_tensor() -> None:
    layout = Layout((2, 2), (Shard(0), Shard(1)))
    assert spans(layout, (4, 6), (1, 1)) == (Span(Box((2, 3), (2, 3)), Box((0, 0), (2, 3)), (2, 3)),)
    assert spans(Layout((), ()), (), ()) == (Span(Box((), ()), Box((), ()), ()),)


def test_strided_shard_that_tells_an_order() -> None:
    # FSDP2 over tensor parallelism: cut over the second axis first. With 7 rows the letter says something else.
    layout = Layout((3, 2), (StridedShard(0, 2), Shard(0)))
    assert rows(layout, 7) == [[0, 1], [4], [2, 3], [5], [], [6]]
    assert layout != Layout((3, 2), (Shard(0), Shard(0)), order=(1, 0))
    assert rows(layout, 7) == rows(Layout((3, 2), (Shard(0), Shard(0)), order=(1, 0)), 7)
    assert rows(Layout((3, 2), (StridedShard(0, 2), Shard(0)), order=(0, 1)), 7) == [[0, 1], [4], [2, 3], [5], [6], []]


def test_strided_shard_that_tells_no_order_is_taken_to_the_letter() -> None:
    assert rows(Layout((4,), (StridedShard(0, 2),)), 9) == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    assert len(spans(Layout((4,), (StridedShard(0, 2),)), (9,), (0,))) == 2
    # The factor 3 is no product of the axes to the right.
    assert rows(Layout((2, 2), (StridedShard(0, 3), Shard(0))), 12) == [[0, 1, 4], [5, 8, 9], [2, 3, 6], [7, 10, 11]]


def test_strided_shard_over_an_interleaved_axis() -> None:
    # FSDP2 over a tensor-parallel axis that holds a fused weight: [W; V], each cut in two, then over the first axis.
    layout = Layout((2, 2), (StridedShard(0, 2), Interleaved(0, (4, 8))))
    assert rows(layout, 12) == [[0, 1, 4], [2, 3, 8], [5, 6, 7], [9, 10, 11]]


def test_interleaved_shards_each_section() -> None:
    layout = Layout((2,), (Interleaved(0, (4, 6)),))
    assert rows(layout, 10) == [[0, 1, 4, 5, 6], [2, 3, 7, 8, 9]]
    assert [s.box for s in spans(layout, (10, 3), (1,))] == [Box((2, 0), (2, 3)), Box((7, 0), (3, 3))]
    assert [s.local for s in spans(layout, (10, 3), (1,))] == [Box((0, 0), (2, 3)), Box((2, 0), (3, 3))]
    uneven = Layout((4,), (Interleaved(0, (3, 0, 5)),))
    assert rows(uneven, 8) == [[0, 3, 4], [1, 5, 6], [2, 7], []]


def test_interleaved_after_another_cut_shards_what_is_left_of_each_section() -> None:
    assert rows(Layout((2, 2), (Shard(0), Interleaved(0, (4, 6)))), 10) == [[0, 1, 4], [2, 3], [5, 6, 7], [8, 9]]
    assert rows(Layout((2, 2), (Interleaved(0, (4, 6)), Shard(0))), 10) == [[0, 1, 4], [5, 6], [2, 3, 7], [8, 9]]


def test_flat_holds_a_range_of_the_flattened_tensor() -> None:
    layout = Layout((3,), (Flat(((0, 7), (7, 7), (7, 20))),))
    assert local_shape(layout, (4, 5), (0,)) == (7,)
    assert local_values(layout, (4, 5), (2,)).tolist() == list(range(7, 20))
    assert spans(layout, (4, 5), (0,)) == (
        Span(Box((0, 0), (1, 5)), Box((0, 0), (1, 5)), (1, 5), 0),
        Span(Box((1, 0), (1, 2)), Box((0, 0), (1, 2)), (1, 2), 5),
    )
    assert spans(layout, (4, 5), (1,)) == ()
    assert rows(layout, 20) == [list(range(7)), [], list(range(7, 20))]
    check_partition(layout, (4, 5))


def test_flat_of_a_0d_tensor() -> None:
    layout = Layout((2,), (Flat(((0, 1), (0, 0))),))
    assert spans(layout, (), (0,)) == (Span(Box((), ()), Box((), ()), (), 0),)
    assert local_shape(layout, (), (0,)) == (1,)
    assert local_shape(layout, (), (1,)) == (0,)


def test_flat_over_tensor_parallelism_flattens_the_local_tensor() -> None:
    layout = Layout((2, 2), (Flat(((0, 5), (5, 12))), Shard(1)), order=(1, 0))
    whole = np.arange(24).reshape(4, 6)
    assert local_values(layout, (4, 6), (0, 1)).tolist() == whole[:, 3:].reshape(-1)[:5].tolist()
    check_partition(layout, (4, 6))


def test_flat_over_sections_needs_no_span_per_row() -> None:
    # Sections of the inner dim: the local rows are [q_t k_t], so a flat range of them meets both in every row.
    layout = Layout((2, 2), (Interleaved(1, (4, 8)), Flat(((0, 100), (100, 600)))))
    assert len(spans(layout, (100, 12), (0, 0))) == 4
    check_partition(layout, (100, 12))
    whole = np.arange(1200).reshape(100, 12)
    local = np.concatenate([whole[:, 2:4], whole[:, 8:12]], axis=1)
    assert local_values(layout, (100, 12), (1, 1)).tolist() == local.reshape(-1)[100:].tolist()


def test_ragged_cuts_the_flattened_leading_dims() -> None:
    layout = Layout((4,), (Ragged((0, 1), (1, 2, 0, 3)),))
    assert [local_shape(layout, (4, 3, 5), (i,)) for i in range(4)] == [(2, 5), (4, 5), (0, 5), (6, 5)]
    whole = np.arange(60).reshape(12, 5)
    assert local_values(layout, (4, 3, 5), (1,)).tolist() == whole[2:6].tolist()
    check_partition(layout, (4, 3, 5))
    assert local_shape(Layout((2,), (Ragged((0,), (1, 3)),)), (8, 3), (1,)) == (6, 3)


def test_ragged_composes() -> None:
    # Cut by columns first (tensor parallelism), ragged after; and the other way round, which is the same.
    ragged, shard = Ragged((0, 1), (1, 2)), Shard(2)
    for order in [(0, 1), (1, 0)]:
        check_partition(Layout((2, 2), (ragged, shard), order=order), (3, 2, 5))
    assert spans(Layout((2, 2), (ragged, shard)), (3, 2, 5), (1, 1)) == spans(
        Layout((2, 2), (ragged, shard), order=(1, 0)), (3, 2, 5), (1, 1)
    )
    twice = Layout((2, 2), (Ragged((0, 1), (1, 1)), Ragged((0, 1), (1, 2))))
    assert [local_shape(twice, (3, 2, 5), c) for c in coordinates((2, 2))] == [(1, 5), (2, 5), (1, 5), (2, 5)]
    check_partition(twice, (3, 2, 5))
    flat = Layout((2, 2), (Ragged((0, 1), (1, 1)), Flat(((0, 4), (4, 15)))))
    check_partition(flat, (3, 2, 5))
    check_partition(Layout((2, 2), (Flat(((0, 15), (15, 30))), Flat(((0, 4), (4, 15))))), (3, 2, 5))


def test_boxes_are_said_one_by_one() -> None:
    boxes = Boxes((Box((0, 0), (2, 4)), Box((0, 4), (2, 2)), Box((2, 0), (2, 6)), Box((0, 0), (0, 0))))
    layout = Layout((4,), (boxes,))
    check_partition(layout, (4, 6))
    assert local_shape(layout, (4, 6), (1,)) == (2, 2)
    after = Layout((2, 4), (Shard(0), boxes))
    assert spans(after, (8, 6), (1, 1))[0].box == Box((4, 4), (2, 2))


def test_replicas_hold_the_same() -> None:
    layout = Layout((2, 3, 2), (Replicate(), Shard(0), Replicate()))
    assert layout.replica_of((1, 2, 1)) == (0, 2, 0)
    check_partition(layout, (7, 3))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_tensors(shape) -> None:
    numel_0 = Flat(((0, 0), (0, 0)))
    for placement in (Shard(0), StridedShard(-1, 3), Interleaved(0, (shape[0], 0)), numel_0, Replicate()):
        layout = Layout((2,), (placement,))
        assert spans(layout, shape, (1,)) == ()
        assert 0 in local_shape(layout, shape, (1,))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (lambda: Layout((2, 2), (Shard(0),)), "1 placements"),
        (lambda: Layout((2, 0), (Shard(0), Shard(0))), "without ranks"),
        (lambda: Layout((2,), (Shard(0, sizes=(1, 2, 3)),)), "axis 0 .* for 3 ranks"),
        (lambda: Layout((2,), (Flat(((0, 1),)),)), "for 1 ranks"),
        (lambda: Layout((2,), (Ragged((0,), (1, 2, 3)),)), "for 3 ranks"),
        (lambda: Layout((2,), (Boxes(()),)), "for 0 ranks"),
        (lambda: Layout((2, 2), (Shard(0), Shard(0)), order=(0, 0)), "order"),
        (lambda: Layout((2, 2), (Shard(0), Shard(0)), order=(0,)), "order"),
    ],
)
def test_placements_that_do_not_fit_the_mesh(layout, message) -> None:
    with pytest.raises(LayoutError, match=message):
        layout()


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        (Shard(2), "dim 2 is out of range for 2 dims"),
        (Shard(-3), "dim -3 is out of range for 2 dims"),
        (StridedShard(2, 2), "dim 2 is out of range"),
        (Shard(0, sizes=(1, 2)), "add up to 3, what is cut of dim 0 has 4"),
        (Interleaved(1, (4, 1)), "add up to 5, dim 1 has 6"),
        (Flat(((0, 25), (0, 0))), "range 0:25 is not in the 24 elements"),
        (Ragged((0, 1, 2), (1, 1)), "out of range"),
        (Ragged((0,), (1, 2)), "4 rows, which 3 units do not divide"),
        (Ragged((0,), (0, 0)), "0 units"),
        (Boxes((Box((0, 0), (5, 6)), Box((0, 0), (0, 0)))), "is not in the shape"),
        (Boxes((Box((0,), (4,)), Box((0,), (0,)))), "is not in the shape"),
    ],
)
def test_placements_that_do_not_fit_the_tensor(placement, reason) -> None:
    with pytest.raises(LayoutError, match=reason) as caught:
        spans(Layout((2,), (placement,)), (4, 6), (0,))
    assert "shape (4, 6)" in str(caught.value)
    assert "mesh (2,)" in str(caught.value)
    with pytest.raises(LayoutError, match=reason):
        local_shape(Layout((2,), (placement,)), (4, 6), (0,))


@pytest.mark.parametrize(
    ("placements", "reason"),
    [
        ((Flat(((0, 12), (12, 24))), Shard(0)), "dim 0 was flattened"),
        ((Ragged((0, 1), (1, 1)), Shard(1)), "dim 1 was flattened"),
        ((Flat(((0, 12), (12, 24))), Ragged((0,), (1, 1))), "other dims were flattened"),
        ((Flat(((0, 12), (12, 24))), Boxes((Box((), ()), Box((), ())))), "dims were flattened"),
    ],
)
def test_placements_that_do_not_fit_each_other(placements, reason) -> None:
    with pytest.raises(LayoutError, match=reason):
        spans(Layout((2, 2), placements), (4, 6), (0, 0))


def test_a_coordinate_off_the_mesh_and_a_negative_shape_are_refused() -> None:
    layout = Layout((2,), (Shard(0),))
    with pytest.raises(LayoutError, match="not on the mesh"):
        spans(layout, (4,), (2,))
    with pytest.raises(LayoutError, match="negative"):
        local_shape(layout, (-4,), (0,))


def test_a_layout_of_4096_ranks_is_a_loop() -> None:
    layout = Layout((64, 8, 8), (StridedShard(0, 8), Replicate(), Shard(0)))
    shape = (16384, 53248)
    firsts = [c for c in coordinates(layout.mesh_shape) if layout.replica_of(c) == c]
    boxes = [span.box for c in firsts for span in spans(layout, shape, c)]
    assert len(boxes) == 512
    assert check_cover(shape, boxes).ok
