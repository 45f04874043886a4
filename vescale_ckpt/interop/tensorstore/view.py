"""``tensorstore``: one tensor of a snapshot as a lazy, read-only TensorStore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import InvalidInputError, NotFoundError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.tensorstore.values import bits_of, library
from vescale_ckpt.interop.zarr.view import chunk_shape

if TYPE_CHECKING:
    from vescale_ckpt.interop.zarr.view import Tensors


def tensorstore(snapshot: Tensors, path: str) -> Any:
    """Return a tensor as a TensorStore that reads from the snapshot what is asked of it, chunk by chunk.

    Args:
        snapshot: of a store, or foreign.
        path: dotted name of the tensor.

    Raises:
        NotFoundError: there is none of this name.
        InvalidInputError: TensorStore has no such dtype.
        ConfigError: TensorStore is not installed.
    """
    ts = library()
    info = snapshot.tensors().get(path)
    if info is None:
        raise NotFoundError(f"cannot find {path!r}: the snapshot has no tensor of this name", fqn=path)
    name = str(info.dtype).removeprefix("torch.")
    try:
        dtype = ts.dtype(name)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"cannot show {path!r} as a TensorStore, which has no {name}", fqn=path) from error

    def read(domain: Any, chunk: Any, _: Any) -> None:
        box = Box(tuple(domain.origin), tuple(domain.shape))
        chunk[...] = bits_of(snapshot.read(path, box)).view(chunk.dtype)

    shape = tuple(info.shape)
    layout = ts.ChunkLayout(read_chunk_shape=chunk_shape(shape, info.dtype.itemsize)) if shape else None
    return ts.virtual_chunked(read, dtype=dtype, shape=list(shape), chunk_layout=layout)
