from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

from vescale_ckpt.adapters.tensors import check_dtype, dtensor_layout, hold, inner_tensors, is_array, pieces_of
from vescale_ckpt.errors import ConfigError, InvalidInputError, LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout, local_shape
from vescale_ckpt.layout.placement import Flat, Interleaved, StridedShard
from vescale_ckpt.layout.placement import Shard as ShardPlacement
from vescale_ckpt.state.leaf import Holding, LeafKind
from vescale_ckpt.state.sharded_view import ShardedView


def only_piece(value):
    held = hold(value, "x")
    (piece,) = held.pieces
    return piece


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(0), True),
        (np.zeros(2), True),
        (np.float32(2), False),
        (io.BytesIO(), True),
        (b"short", False),
        (bytes(5000), True),
        (bytearray(5000), False),
        (ShardedView((2,), torch.int8), True),
        ([torch.zeros(1)], False),
    ],
)
def test_what_is_an_array(value, expected):
    assert is_array(value) is expected


def test_a_plain_tensor_is_one_view_of_its_memory():
    tensor = torch.arange(6.0).reshape(2, 3).requires_grad_()
    held = hold(tensor, "x")
    (piece,) = held.pieces
    assert (held.global_shape, held.dtype, held.kind, held.holding) == (
        (2, 3),
        torch.float32,
        LeafKind.TENSOR,
        Holding.REPLICATED,
    )
    assert piece.box == Box((0, 0), (2, 3))
    assert piece.view.data_ptr() == tensor.data_ptr()
    assert not piece.view.requires_grad
    assert type(piece.view) is torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x.reshape(2, 2, 2, 3).permute(3, 0, 2, 1),
        lambda x: x.reshape(1, 4, 2, 3).contiguous(memory_format=torch.channels_last),
        lambda x: x[1],
        lambda x: x[2, 3],
        lambda x: x[:1].expand(5, 6),
        lambda x: nn.Parameter(x[1:3]),
    ],
)
def test_a_view_is_its_own_elements_whatever_its_strides(make):
    base = torch.arange(24.0).reshape(4, 6)
    view = make(base)
    piece = only_piece(view)
    assert torch.equal(piece.view, view.detach())
    assert piece.box.shape == tuple(view.shape)
    if view.is_contiguous() and view.dim() < 4:
        assert piece.view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_an_empty_tensor_has_no_pieces_and_a_scalar_has_one():
    assert hold(torch.empty(3, 0, 2), "x").pieces == ()
    assert hold(torch.empty(3, 0, 2), "x").global_shape == (3, 0, 2)
    assert only_piece(torch.tensor(2.0)).box == Box((), ())


def test_conjugates_and_negatives_are_resolved():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert only_piece(z.conj()).view.tolist() == [1 - 2j, 3 + 4j]
    assert not only_piece(z.conj()).view.is_conj()
    negative = z.conj().imag
    assert negative.is_neg()
    assert only_piece(negative).view.tolist() == [-2.0, 4.0]
    assert not only_piece(negative).view.is_neg()


def released():
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def managed():
    tensor = torch.zeros(0)
    tensor.ds_status = "released"
    return tensor


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

    with FakeTensorMode():
        return torch.zeros(2)


class Hollow(torch.Tensor):
    """A wrapper subclass that does not say what it wraps."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (3,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage", "ignore:.*are deprecated")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "int_repr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "nested"),
        (lambda: nn.LazyLinear(2).weight, "not initialised"),
        (released, "memory is released"),
        (managed, "gather it first"),
        (fake, "fake tensor"),
        (Hollow, "Hollow"),
    ],
)
def test_what_has_no_honest_bytes_is_refused_by_name(make, reason):
    with pytest.raises(InvalidInputError, match=rf"'model\.w'.*{reason}"):
        hold(make(), "model.w")


def test_a_subclass_on_memory_of_its_own_is_its_memory():
    class Tagged(torch.Tensor):
        pass

    tagged = torch.arange(3.0).as_subclass(Tagged)
    piece = only_piece(tagged)
    assert type(piece.view) is torch.Tensor
    assert piece.view.data_ptr() == tagged.data_ptr()


def test_the_inner_tensors_of_a_wrapper():
    assert inner_tensors(TwoTensor(torch.zeros(1), torch.ones(1))) == ("a", "b")
    assert inner_tensors(torch.zeros(1)) == ()
    assert inner_tensors(nn.Parameter(torch.zeros(1))) == ()


def test_a_dtype_that_no_store_holds_is_refused_by_name():
    check_dtype(torch.float8_e4m3fn, "w")
    with pytest.raises(ConfigError, match=r"'model\.w'"):
        check_dtype(torch.qint8, "model.w")


# memory that is the same


def identity(value):
    return hold(value, "x").identity


def test_the_same_memory_read_in_the_same_way_is_identical():
    x = torch.arange(12.0).reshape(3, 4)
    assert identity(x) == identity(x.detach()) == identity(nn.Parameter(x)) == identity(x.view(3, 4))
    assert identity(x[:, 1]) == identity(x[:, 1])
    assert identity(x[:1]) == identity(x[0].unsqueeze(0))  # the stride of a dim of size 1 says nothing
    assert identity(x.numpy()) == identity(x.numpy())


def test_other_memory_or_another_reading_is_not():
    x = torch.arange(12.0).reshape(3, 4)
    others = [x.clone(), x.t(), x.reshape(4, 3), x[:2], x[1:], x.view(torch.int32), x.numpy()]
    found = [identity(x), *(identity(other) for other in others)]
    assert len(set(found)) == len(found)
    z = torch.zeros(2, dtype=torch.complex64)
    assert identity(z) != identity(z.conj())


def test_empty_tensors_are_never_the_same():
    x = torch.zeros(4)
    assert identity(x[:0]) is None
    assert identity(torch.empty(0)) is None


# numpy, bytes, explicit offsets


@pytest.mark.parametrize("dtype", ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"])
def test_numpy_numbers_are_views(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    held = hold(array, "x")
    assert held.kind is LeafKind.NUMPY
    assert held.pieces[0].view.data_ptr() == array.ctypes.data
    assert np.array_equal(held.pieces[0].view.numpy(), array)


@pytest.mark.parametrize(
    "make",
    [lambda a: a[::-1], lambda a: a.T, lambda a: a[:, ::2], lambda a: np.broadcast_to(a[0], (3, 4)), lambda a: a[1, 2]],
)
def test_numpy_arrays_of_any_strides(make):
    array = np.asarray(make(np.arange(12.0).reshape(3, 4)))
    assert np.array_equal(only_piece(array).view.numpy(), array)


def test_read_only_numpy_arrays_are_not_copied():
    array = np.arange(3.0)
    array.flags.writeable = False
    piece = only_piece(array)
    assert piece.view.data_ptr() == array.ctypes.data
    del array
    assert piece.view.tolist() == [0.0, 1.0, 2.0]


def test_a_field_of_a_structured_array_has_strides_that_torch_lacks():
    array = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i1"), ("b", "<f8")])
    assert only_piece(array["b"]).view.tolist() == [2.0, 4.0]
    assert identity(array["b"]) is None


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]),
        np.array([object()]),
        np.array([1], dtype=">i4"),
        np.array(["2020"], dtype="datetime64[D]"),
        np.zeros(1, dtype=[("a", "i4")]),
        np.zeros(1, dtype=np.longdouble),
        np.ma.masked_array([1.0], mask=[True]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_numpy_arrays_that_are_not_plain_numbers_are_refused(array):
    with pytest.raises(InvalidInputError, match="'x'"):
        hold(array, "x")


def test_bytes_are_copied_so_that_the_caller_may_go_on():
    stream = io.BytesIO(b"hello")
    stream.read(2)
    held = hold(stream, "x")
    stream.write(b"!!!!!!!!")
    assert (held.kind, held.dtype, held.global_shape) == (LeafKind.BYTES_IO, torch.uint8, (5,))
    assert bytes(held.pieces[0].view.tolist()) == b"hello"
    assert hold(io.BytesIO(), "x").pieces == ()
    assert hold(bytes(5000), "x").kind is LeafKind.BYTES


def test_explicit_offsets_are_honoured():
    local = torch.arange(12.0).reshape(4, 3)
    held = hold(ShardedView((8, 3), torch.float32, [((1, 0), local), ((0, 0), torch.empty(0, 3))]), "x")
    assert held.holding is Holding.SHARDED
    assert [piece.box for piece in held.pieces] == [Box((1, 0), (4, 3))]
    assert held.pieces[0].view.data_ptr() == local.data_ptr()


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((7, 3), Layout((4,), (ShardPlacement(0),))),
        ((16, 3), Layout((2,), (Interleaved(0, (8, 8)),))),
        ((5, 3), Layout((2,), (Flat(((0, 4), (4, 15))),))),
    ],
)
def test_pieces_of_any_layout_cover_the_tensor(shape, layout):
    full = torch.arange(float(np.prod(shape))).reshape(shape)
    seen = torch.full(shape, -1.0)
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        local = torch.zeros(local_shape(layout, shape, coordinate))
        for piece in pieces_of(local, layout, shape, coordinate):
            piece.view.copy_(full[piece.box.slices])
        for piece in pieces_of(local, layout, shape, coordinate):
            assert (seen[piece.box.slices] == -1).all()
            seen[piece.box.slices] = piece.view
    assert torch.equal(seen, full)


# DTensors


def dtensor(full, mesh, placements, rank_shape=None):
    """Return this rank's DTensor of a tensor, cut by our own layout, since the world does not talk."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(full.shape, full.stride(), full.dtype))
    shell = DTensor(torch.empty(0), spec, requires_grad=False)
    layout = dtensor_layout(shell, "x")
    coordinate = tuple(mesh.get_coordinate())
    local = torch.empty(rank_shape or local_shape(layout, tuple(full.shape), coordinate), dtype=full.dtype)
    tensor = DTensor(local, spec, requires_grad=False)
    if rank_shape is None:
        for piece in hold(tensor, "x").pieces:
            piece.view.copy_(full[piece.box.slices])
    return tensor


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((7, 3), [Replicate(), Shard(0)]),
        ((7, 5), [Shard(0), Shard(1)]),
        ((7, 5), [Shard(1), Shard(0)]),
        ((8, 3), [Shard(0), Shard(0)]),
        ((3, 2), [Shard(0), Shard(0)]),
        ((12, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((7, 3), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((), [Replicate(), Replicate()]),
    ],
)
def test_the_pieces_of_all_ranks_are_the_tensor(fake_world, shape, placements):
    full = torch.arange(float(np.prod(shape))).reshape(shape)
    seen = torch.zeros(shape)
    copies = torch.zeros(shape)
    for rank in range(6):
        fake_world(rank, 6)
        tensor = dtensor(full, init_device_mesh("cpu", (2, 3)), placements)
        held = hold(tensor, "x")
        assert held.global_shape == shape
        for piece in held.pieces:
            seen[piece.box.slices or ...] = piece.view
            copies[piece.box.slices or ...] += 1
    assert torch.equal(seen, full)
    assert copies.unique().numel() == 1


def test_an_order_of_cuts_of_its_own_is_part_of_the_layout(fake_world):
    """[16, 3] over dp2 x tp2, cut by tp first and then by dp: rank (d, t) has rows t*8 + d*4 and on."""
    for rank, first_row in enumerate([0, 8, 4, 12]):
        fake_world(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        meta = TensorMeta(torch.Size((16, 3)), (3, 1), torch.float32)
        order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
        held = hold(DTensor(torch.zeros(4, 3), spec, requires_grad=False), "x")
        assert [piece.box for piece in held.pieces] == [Box((first_row, 0), (4, 3))]
        strided = DTensorSpec(mesh, (_StridedShard(0, split_factor=2), Shard(0)), tensor_meta=meta)
        other = hold(DTensor(torch.zeros(4, 3), strided, requires_grad=False), "x")
        assert [piece.box for piece in other.pieces] == [Box((first_row, 0), (4, 3))]


def test_a_pending_sum_is_refused_with_a_way_out(fake_world):
    fake_world(0, 2)
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(LayoutError, match=r"'w'.*redistribute"):
        hold(tensor, "w")


def test_a_local_tensor_that_contradicts_its_layout_is_refused(fake_world):
    """Locals of 3, 3, 3, 1 rows with no global shape: rank 3 says 4 rows in all, others 12."""
    fake_world(3, 4)
    mesh = init_device_mesh("cpu", (4,))
    guessed = DTensor.from_local(torch.zeros(1, 2), mesh, [Shard(0)])
    assert hold(guessed, "w").global_shape == (4, 2)  # consistent here, and contradicted by the other ranks
    wrong = dtensor(torch.zeros(10, 2), mesh, [Shard(0)], rank_shape=(2, 2))
    with pytest.raises(LayoutError, match=r"'w'.*\(1, 2\).*\(2, 2\).*ShardedView"):
        hold(wrong, "w")


def test_a_placement_that_is_not_known_is_refused(fake_world):
    from torch.distributed.tensor.placement_types import Placement  # noqa: PLC0415

    class Ragged(Placement):
        pass

    fake_world(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    meta = TensorMeta(torch.Size((4,)), (1,), torch.float32)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    tensor = DTensor(torch.zeros(4), spec, requires_grad=False)
    spec.placements = (Ragged(),)
    with pytest.raises(LayoutError, match=r"'w'.*ShardedView"):
        hold(tensor, "w")


def test_dtensors_are_the_same_where_memory_and_layout_are(fake_world):
    fake_world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.arange(4.0)
    one, other = (DTensor.from_local(local, mesh, [Shard(0)]) for _ in range(2))
    assert identity(one) == identity(other) == identity(one.detach())
    assert identity(one) != identity(DTensor.from_local(local, mesh, [Replicate()], run_check=False))
    assert identity(one) != identity(local)
    empty, twin = (dtensor(torch.zeros(1, 2), mesh, [Shard(0)]) for _ in range(2))
    assert empty.to_local().numel() == 0
    assert identity(empty) == identity(empty)  # a tie that this rank holds nothing of
    assert identity(empty) != identity(twin)


def test_a_dtensor_that_wraps_a_wrapper_is_refused(fake_world):
    fake_world(0, 2)
    meta = TensorMeta(torch.Size((2,)), (1,), torch.float32)
    spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Replicate(),), tensor_meta=meta)
    inner = TwoTensor(torch.zeros(2), torch.zeros(2))
    with pytest.raises(InvalidInputError, match=r"'w'.*TwoTensor"):
        hold(DTensor(inner, spec, requires_grad=False), "w")


def test_the_strided_placement_is_carried_over(fake_world):
    fake_world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = dtensor(torch.zeros(8, 2), mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    assert dtensor_layout(tensor, "x") == Layout((2, 2), (StridedShard(0, 2), ShardPlacement(0)))
