from __future__ import annotations

import threading

import pytest
import torch

from vescale_ckpt.errors import InternalError, StorageTimeoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.parts import Part
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import Stager, view_of
from vescale_ckpt.state.leaf import Piece, TensorLeaf


def whole(tensor):
    shape = tuple(tensor.shape)
    return TensorLeaf(("w",), tensor.dtype, shape, (Piece(Box.whole(shape), tensor),))


def part(*numbers, tensor=0):
    """Return the part of rows ``a`` to ``b``."""
    start, stop, *rest = numbers
    return Part(tensor, Box((start, *(0 for _ in rest)), (stop - start, *rest)), stored=True)


def stage(parts, leaves, pool=None, *, in_place=False, deadline_seconds=5.0, **more):
    out = []
    copied = Stager(pool or BufferPool(256, None), deadline_seconds).stage(
        parts, leaves, out.append, in_place=in_place, **more
    )
    return out, copied


def values(staged, dtype=torch.float32):
    return staged.source.contiguous().view(dtype)


def test_the_caller_may_change_its_tensor_afterwards():
    tensor = torch.arange(12.0).reshape(6, 2)
    (a, b), copied = stage([part(0, 3, 2), part(3, 6, 2)], [whole(tensor)])
    tensor.fill_(-1)
    assert values(a).tolist() == [[0, 1], [2, 3], [4, 5]]
    assert values(b).tolist() == [[6, 7], [8, 9], [10, 11]]
    assert copied == 48
    assert a.slab is b.slab, "small parts share a slab"


def test_in_place_nothing_is_copied_and_nothing_is_taken():
    pool = BufferPool(256, 0)
    tensor = torch.arange(12.0).reshape(6, 2)
    (only,), copied = stage([part(2, 4, 2)], [whole(tensor)], pool, in_place=True)
    assert only.source.data_ptr() == tensor[2:].data_ptr()
    assert (only.slab, copied, pool.peak_bytes) == (None, 0, 0)
    only.hold()
    only.release()
    only.release()


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).reshape(4, 6).t(),
        torch.arange(24.0).reshape(6, 4)[:, ::2],
        torch.arange(6.0)[:, None].expand(6, 4),
        torch.arange(24.0).reshape(6, 4).requires_grad_(),
    ],
    ids=["transposed", "strided", "expanded", "with gradient"],
)
def test_whatever_the_strides_the_staged_part_is_row_major(view):
    with torch.no_grad():
        (only,), _ = stage([part(1, 5, view.shape[1])], [whole(view)])
    assert only.source.is_contiguous()
    assert torch.equal(values(only), view.detach()[1:5])


def test_scalars_of_every_kind_are_staged():
    leaves = [whole(torch.tensor(value)) for value in (1.5, True, 7, 1 + 2j)]
    staged, copied = stage([Part(i, Box((), ()), stored=True) for i in range(4)], leaves)
    assert [values(s, leaf.dtype).item() for s, leaf in zip(staged, leaves, strict=True)] == [1.5, True, 7, 1 + 2j]
    assert copied == 4 + 1 + 8 + 8


def test_parts_of_different_widths_in_one_slab_do_not_touch():
    leaves = [whole(torch.arange(3, dtype=torch.uint8)), whole(torch.arange(3.0)), whole(torch.arange(3))]
    staged, _ = stage([part(0, 3, tensor=i) for i in range(3)], leaves)
    assert [values(s, leaf.dtype).tolist() for s, leaf in zip(staged, leaves, strict=True)] == [[0, 1, 2]] * 3
    assert len({id(s.slab) for s in staged}) == 1


def test_a_slab_comes_back_when_the_last_of_its_parts_is_released():
    pool = BufferPool(256, 1)
    (a, b), _ = stage([part(0, 3, 2), part(3, 6, 2)], [whole(torch.zeros(6, 2))], pool)
    assert pool.try_take() is None
    a.release()
    b.hold()
    b.release()
    assert pool.try_take() is None
    b.release()
    assert pool.try_take() is not None


def test_a_full_slab_is_handed_over_before_the_next_one_is_filled():
    tensor = torch.arange(256.0).reshape(8, 32)  # two rows fill a slab
    seen = []

    def hand_over(staged):
        seen.append((staged.part.box.offset[0], values(staged)[0, 0].item()))
        staged.release()

    pool = BufferPool(256, 1)
    Stager(pool, 1.0).stage([part(i, i + 1, 32) for i in range(8)], [whole(tensor)], hand_over, in_place=False)
    assert seen == [(i, 32.0 * i) for i in range(8)]
    assert pool.peak_bytes == 256


def test_a_part_wider_than_a_slab_gets_memory_of_its_own():
    pool = BufferPool(64, 2)
    tensor = torch.arange(100.0)
    (small, large, last), _ = stage([part(0, 2), part(2, 98), part(98, 100)], [whole(tensor)], pool)
    assert values(large).tolist() == list(range(2, 98))
    assert values(small).tolist() == [0, 1]
    assert values(last).tolist() == [98, 99]
    assert pool.peak_bytes == 128


def test_without_memory_staging_waits_and_then_says_why():
    pool = BufferPool(64, 1)
    with pytest.raises(StorageTimeoutError, match="no staging buffer"):
        stage([part(0, 10), part(10, 20)], [whole(torch.zeros(20))], pool, deadline_seconds=0.2)


def test_what_was_staged_before_an_error_is_handed_over_all_the_same():
    """The receiver releases it: a slab that nobody knew of would be lost to the pool."""
    pool = BufferPool(64, 1)
    out = []
    with pytest.raises(StorageTimeoutError):
        Stager(pool, 0.2).stage([part(0, 10), part(10, 20)], [whole(torch.zeros(20))], out.append, in_place=False)
    assert len(out) == 1
    assert pool.try_take() is None, "its bytes are still needed"
    out[0].release()
    assert pool.try_take() is not None


def test_who_waits_for_memory_may_give_up():
    pool = BufferPool(64, 1)

    def give_up():
        raise RuntimeError("the save is lost")

    with pytest.raises(RuntimeError, match="the save is lost"):
        stage([part(0, 10), part(10, 20)], [whole(torch.zeros(20))], pool, on_wait=give_up)


def test_another_thread_makes_room():
    pool = BufferPool(64, 1)
    got = []

    def hand_over(staged):
        got.append(values(staged).clone())
        threading.Timer(0.05, staged.release).start()

    tensor = torch.arange(40.0)
    Stager(pool, 30.0).stage([part(i, i + 10) for i in range(0, 40, 10)], [whole(tensor)], hand_over, in_place=False)
    assert torch.cat(got).tolist() == tensor.tolist()


def test_a_part_is_taken_from_the_piece_that_holds_it():
    full = torch.arange(20.0).reshape(10, 2)
    pieces = (Piece(Box((0, 0), (4, 2)), full[:4].clone()), Piece(Box((6, 0), (4, 2)), full[6:].clone()))
    leaf = TensorLeaf(("w",), torch.float32, (10, 2), pieces)
    assert view_of(leaf, part(7, 9, 2)).tolist() == full[7:9].tolist()
    assert view_of(leaf, part(0, 4, 2)).data_ptr() == pieces[0].view.data_ptr()


@pytest.mark.parametrize("leaf", [None, whole(torch.zeros(3))])
def test_a_plan_that_asks_for_what_is_not_held_is_our_bug(leaf):
    with pytest.raises(InternalError, match="does not hold"):
        view_of(leaf, part(2, 5))
