"""Tensors to pieces: what a rank holds of anything that is an array, as boxes with views of its memory.

Nothing is copied and nothing leaves its device, but for what cannot be viewed (conjugates, bytes). What has no honest
bytes (meta, sparse, quantized, partial sums, released memory) is refused: a checkpoint never holds a guess.
"""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_ckpt.adapters.names import is_instance_of
from vescale_ckpt.errors import ConfigError, InvalidInputError, LayoutError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout import layout as layouts
from vescale_ckpt.layout import placement as placements
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.leaf import Holding, LeafKind, Piece
from vescale_ckpt.state.sharded_view import ShardedView

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import numpy.typing as npt

LARGE_BYTES = 4096
"""A bytes value longer than this is stored as an array and not in the state tree."""

_NUMPY_KINDS = "biufc"

_DENSE_TYPES = (torch.Tensor, nn.Parameter)
"""Nearly all tensors: the way that is quick."""


@dataclass(frozen=True, slots=True)
class Held:
    """What this rank holds of one array."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    kind: LeafKind = LeafKind.TENSOR
    holding: Holding = Holding.REPLICATED
    identity: Hashable = None
    """Equal for two arrays that are the same memory read in the same way; None where that cannot be told."""


def is_array(value: Any) -> bool:
    """Return whether a value is stored in the tensor table."""
    if isinstance(value, bytes):
        return len(value) > LARGE_BYTES
    return isinstance(value, torch.Tensor | np.ndarray | io.BytesIO | ShardedView)


def hold(value: Any, what: str) -> Held:
    """Return what this rank holds of ``value``; ``what`` names it in errors.

    Raises:
        InvalidInputError: its bytes cannot be had.
        LayoutError: its local memory contradicts its layout.
    """
    for cls, hold_it in _HOLD:
        if isinstance(value, cls):
            return hold_it(value, what)
    raise InvalidInputError(f"cannot take '{what}' as an array: it is {type(value).__name__}", fqn=what)


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Refuse a dtype that no store holds.

    Raises:
        ConfigError: it is such a dtype; names the tensor and the way out.
    """
    try:
        dtype_name(dtype)
    except ConfigError as error:
        raise ConfigError(f"'{what}': {error.message}", fqn=what) from error


def inner_tensors(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return the names of the tensors that a wrapper subclass is made of; none for any other tensor."""
    if isinstance(tensor, DTensor) or _is_async(tensor) or not hasattr(type(tensor), "__tensor_flatten__"):
        return ()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return tuple(names)


def plain(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a detached view of a plain tensor's memory.

    Raises:
        InvalidInputError: it has no dense memory of its own.
    """
    if _is_async(tensor):
        tensor = tensor.wait()  # type: ignore[attr-defined]
    reason = _no_honest_bytes(tensor)
    if reason is not None:
        raise InvalidInputError(f"cannot take the bytes of '{what}': {reason}", fqn=what)
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    return tensor.detach()


def dtensor_layout(tensor: DTensor, what: str) -> layouts.Layout:
    """Return a DTensor's layout.

    Raises:
        LayoutError: a placement that no box describes, such as a pending sum.
    """
    for placement in tensor.placements:
        if not isinstance(placement, Replicate | Shard | _StridedShard) and not _is_named(placement):
            _refuse_placement(placement, what)
    # The order of cuts on one dim has no public name; where it is not that of the axes it is part of the layout.
    shard_order = getattr(tensor._spec, "shard_order", None) or ()  # noqa: SLF001
    return _layout(tuple(tensor.device_mesh.shape), tuple(tensor.placements), tuple(shard_order), tensor.ndim)


@functools.lru_cache(maxsize=1024)
def _layout(
    mesh_shape: tuple[int, ...], cuts: tuple[Any, ...], shard_order: tuple[Any, ...], ndim: int
) -> layouts.Layout:
    ours = tuple(_placement(cut, ndim) for cut in cuts)
    if any(map(_is_named, cuts)):  # they cut what all others have left
        return layouts.Layout(mesh_shape, ours, order=tuple(sorted(range(len(cuts)), key=lambda i: _is_named(cuts[i]))))
    order = [axis for entry in shard_order for axis in entry.mesh_dims]
    if all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in shard_order):
        return layouts.Layout(mesh_shape, ours)
    rest = [axis for axis in range(len(cuts)) if axis not in order]
    return layouts.Layout(mesh_shape, ours, order=(*order, *rest))


def pieces_of(
    local: torch.Tensor,
    layout: layouts.Layout,
    global_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[Piece, ...]:
    """Return the pieces of a local tensor that a layout says is at a coordinate.

    Raises:
        LayoutError: the local tensor has not the shape that the layout gives it.
    """
    expected, spans = _places(layout, global_shape, coordinate)
    if tuple(local.shape) != tuple(expected):
        raise LayoutError(
            f"shape {global_shape} laid out by {layout.placements} on mesh {layout.mesh_shape} gives coordinate "
            f"{coordinate} a local tensor of shape {tuple(expected)}, but it holds {tuple(local.shape)}"
        )
    return tuple(Piece(span.box, _resolved(span.view_of(local))) for span in spans)


@functools.lru_cache(maxsize=4096)
def _places(
    layout: layouts.Layout, global_shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[layouts.Span, ...]]:
    """Return the local shape and the spans: the layers of a model repeat the same few shapes."""
    return (
        layouts.local_shape(layout, global_shape, coordinate),
        layouts.spans(layout, global_shape, coordinate),
    )


def _is_named(placement: Any) -> bool:
    """Return whether a placement that torch does not know says itself which of ours it is."""
    return callable(getattr(placement, "checkpoint_placement", None))


def _placement(placement: Any, ndim: int) -> placements.Placement:
    if _is_named(placement):
        return placement.checkpoint_placement()  # type: ignore[no-any-return]
    if isinstance(placement, Replicate):
        return placements.Replicate()
    if isinstance(placement, _StridedShard):
        return placements.StridedShard(placement.dim % ndim, int(placement.split_factor))
    return placements.Shard(placement.dim % ndim)


def _refuse_placement(placement: Any, what: str) -> None:
    if isinstance(placement, Partial):
        reason = "is a sum still to be made; redistribute it first, to Replicate or Shard"
    else:
        reason = "is not known here; pass it as a ShardedView with explicit offsets"
    raise LayoutError(f"cannot take the bytes of '{what}': its placement {placement!r} {reason}", fqn=what)


def _hold_dtensor(tensor: DTensor, what: str) -> Held:
    layout = dtensor_layout(tensor, what)
    coordinate = tensor.device_mesh.get_coordinate()
    shape = tuple(tensor.shape)
    replicated = all(isinstance(p, Replicate) for p in tensor.placements)
    holding = Holding.REPLICATED if replicated else Holding.SHARDED
    if coordinate is None:
        return Held(tensor.dtype, shape, (), holding=holding, identity=("object", id(tensor)))
    with torch.no_grad():
        outer = tensor.to_local()
    if inner_tensors(outer):
        raise InvalidInputError(
            f"cannot take the bytes of '{what}': its local tensor is a {type(outer).__name__}, which wraps others; "
            f"save what it wraps, one by one",
            fqn=what,
        )
    local = plain(outer, what)
    try:
        pieces = pieces_of(local, layout, shape, tuple(coordinate))
    except LayoutError as error:
        raise LayoutError(
            f"cannot place '{what}': {error.message}; state the global shape when making the DTensor, or pass a "
            f"ShardedView with explicit offsets",
            fqn=what,
        ) from error
    memory = _identity(local) if local.numel() else ("object", id(tensor))
    identity = ("dtensor", memory, tensor.device_mesh, layout, shape)
    return Held(local.dtype, shape, pieces, holding=holding, identity=identity)


def _hold_tensor(tensor: torch.Tensor, what: str) -> Held:
    dense = plain(tensor, what)
    shape = tuple(dense.shape)
    return Held(dense.dtype, shape, _whole(_resolved(dense)), identity=_identity(dense))


def _hold_numpy(array: npt.NDArray[Any], what: str) -> Held:
    if type(array) not in {np.ndarray, np.memmap}:
        raise InvalidInputError(
            f"cannot take the bytes of '{what}': {type(array).__name__} may hold more than its numbers; "
            f"pass numpy.asarray of it, and what else it holds beside it",
            fqn=what,
        )
    if array.dtype.kind not in _NUMPY_KINDS or not array.dtype.isnative or array.dtype.itemsize > 16:
        raise InvalidInputError(
            f"cannot take the bytes of '{what}': numpy dtype {array.dtype.str!r} is not a plain number in native byte "
            f"order; convert it, or hold its items in a list",
            fqn=what,
        )
    tensor = numpy_view(array, what)
    identity = ("numpy", _identity(tensor)) if np.shares_memory(array, tensor.numpy()) else None
    return Held(tensor.dtype, tuple(array.shape), _whole(tensor), kind=LeafKind.NUMPY, identity=identity)


def numpy_view(array: npt.NDArray[Any], what: str) -> torch.Tensor:
    """Return a tensor on the memory of a numpy array, or on a copy where torch cannot express its strides.

    Raises:
        InvalidInputError: torch has no such dtype.
    """
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        array = array.copy()
    if not array.flags.writeable:
        array = np.asarray(_Writable(array))
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InvalidInputError(f"cannot take the bytes of '{what}': {error}", fqn=what) from error


class _Writable:
    """The same memory, said to be writable: torch warns of read-only memory, and a save only reads."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self.owner = array


def _hold_view(view: ShardedView, what: str) -> Held:
    pieces = tuple(
        Piece(box, _resolved(plain(local, what)))
        for box, (_, local) in zip(view.boxes, view.pieces, strict=True)
        if box.volume
    )
    # The same memory at the same places is the same tensor, whoever made the view.
    memory = tuple((piece.box, _identity(piece.view)) for piece in pieces) or id(view)
    identity = ("view", view.global_shape, memory)
    return Held(view.dtype, view.global_shape, pieces, holding=Holding.SHARDED, identity=identity)


def _hold_bytes(value: bytes | io.BytesIO, _: str) -> Held:
    data = value if isinstance(value, bytes) else value.getvalue()
    kind = LeafKind.BYTES if isinstance(value, bytes) else LeafKind.BYTES_IO
    # A copy: torch takes no read-only memory, and a BytesIO with a view on it could not be written to.
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return Held(torch.uint8, (len(data),), _whole(tensor), kind=kind)


def _whole(tensor: torch.Tensor) -> tuple[Piece, ...]:
    shape = tuple(tensor.shape)
    return (Piece(Box.whole(shape), tensor),) if tensor.numel() else ()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _identity(tensor: torch.Tensor) -> Hashable:
    if not tensor.numel():
        return None
    strides = tuple(n for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    bits = (tensor.is_conj(), tensor.is_neg())
    return str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), strides, tensor.dtype, bits


def _is_async(tensor: torch.Tensor) -> bool:
    return is_instance_of(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _no_honest_bytes(tensor: torch.Tensor) -> str | None:
    """Return why a tensor has no dense memory of its own, or None if it has."""
    if type(tensor) in _DENSE_TYPES and tensor.layout is torch.strided and not _is_odd(tensor):
        return _no_memory(tensor)
    checks = (
        (nn.parameter.is_lazy(tensor), "it is not initialised yet; run one forward first"),
        (
            is_instance_of(tensor, "torch._subclasses.fake_tensor", "FakeTensor"),
            "it is a fake tensor without memory; materialise it first",
        ),
        (tensor.is_meta, "it is on the meta device and has no memory; materialise it first"),
        (tensor.is_nested, "it is a nested tensor; save its parts, one by one"),
        (tensor.is_quantized, "it is quantized; save its int_repr(), scales and zero points"),
        (tensor.layout != torch.strided, f"its layout is {tensor.layout}; save its indices and values, or to_dense()"),
        (hasattr(tensor, "ds_status"), "its full memory is managed by ZeRO-3; gather it first"),
    )
    return next((reason for found, reason in checks if found), None) or _no_memory(tensor)


def _is_odd(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or tensor.is_nested or tensor.is_quantized or hasattr(tensor, "ds_status")


def _no_memory(tensor: torch.Tensor) -> str | None:
    """Return why a dense tensor's memory cannot be had, or None if it can."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    if _needed_bytes(tensor) > storage.nbytes():
        return "its memory is released; gather it first"
    try:
        has_memory = storage.data_ptr() != 0
    except RuntimeError:  # torch's word for a subclass that only wraps other tensors
        has_memory = False
    if not has_memory:
        return f"a {type(tensor).__name__} has no memory of its own; save the tensors that it wraps"
    return None


def _needed_bytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((tensor.storage_offset() + last + 1) * tensor.element_size())


_HOLD: tuple[tuple[Any, Callable[[Any, str], Held]], ...] = (
    (DTensor, _hold_dtensor),
    (torch.Tensor, _hold_tensor),
    (np.ndarray, _hold_numpy),
    (ShardedView, _hold_view),
    ((bytes, io.BytesIO), _hold_bytes),
)
