"""A snapshot seen as a zarr v3 group: keys and values, made when they are asked for; nothing is copied before."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.zarr.chunks import padded
from vescale_ckpt.interop.zarr.nodes import (
    CORE,
    EXTENSIONS,
    NODE_NAME,
    ZarrArray,
    encode_array,
    encode_group,
    node_name,
)
from vescale_ckpt.stage.raw import as_integers, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CHUNK_BYTES: Final = 4 << 20


class Tensors(Protocol):
    """What is shown: a ``Snapshot`` of a store, or a ``ForeignSnapshot``."""

    def tensors(self) -> Mapping[str, Any]:
        """Return name -> what is known of every tensor."""

    def read(self, path: str, box: Box | None = None, /) -> torch.Tensor:
        """Return a box of a tensor."""


def chunk_shape(shape: tuple[int, ...], item_bytes: int, max_bytes: int = _CHUNK_BYTES) -> tuple[int, ...]:
    """Return how an array is cut: the leading dims, until a chunk is no larger than ``max_bytes``."""
    chunk = [max(1, size) for size in shape]
    for dim in range(len(chunk)):
        rest = item_bytes
        for size in chunk[dim + 1 :]:
            rest *= size
        chunk[dim] = max(1, min(chunk[dim], max_bytes // rest))
        if chunk[dim] * rest <= max_bytes:
            break
    return tuple(chunk)


class ZarrView:
    """The keys of a group and what is under them.

    Args:
        snapshot: what is shown.
        extensions: show bfloat16 and 8-bit floats under their registered names, as TensorStore reads them; without it
            they are unsigned integers with an attribute, which everybody reads.
    """

    def __init__(self, snapshot: Tensors, *, extensions: bool = False) -> None:
        self._snapshot = snapshot
        self._arrays: dict[str, tuple[str, ZarrArray]] = {}
        self._nodes: dict[str, bytes] = {NODE_NAME: encode_group()}
        self.notes: tuple[str, ...] = ()
        """Which tensors are shown as integers, one line each."""
        notes = []
        for name, info in snapshot.tensors().items():
            shape, dtype = tuple(info.shape), info.dtype
            chunk = chunk_shape(shape, dtype.itemsize)
            node = node_name(name)
            self._arrays[node] = (name, ZarrArray(dtype, shape, chunk, "/", "c"))
            self._nodes[f"{node}/{NODE_NAME}"] = encode_array(name, dtype, shape, chunk, extensions=extensions)
            if dtype not in CORE and not (extensions and dtype in EXTENSIONS):
                notes.append(f"{name}: {dtype} is shown as unsigned integers, for zarr-python has no such dtype")
        self.notes = tuple(notes)

    def keys(self) -> Iterator[str]:
        """Yield every key."""
        yield from self._nodes
        for node, (_, array) in self._arrays.items():
            for index in itertools.product(*map(range, array.grid)):
                yield f"{node}/{array.key(index)}"

    def nodes(self) -> list[str]:
        """Return the names of the arrays."""
        return list(self._arrays)

    def get(self, key: str) -> bytes | None:
        """Return what is under a key; None where nothing is.

        Raises:
            CorruptionError, StorageError: the tensor cannot be read.
        """
        found = self._nodes.get(key)
        if found is not None:
            return found
        place = self._place(key)
        if place is None:
            return None
        name, array, box = place
        part = as_integers(self._snapshot.read(name, box))
        return bytes(memory_of(padded(part, array.chunk).reshape(-1).view(torch.uint8)))

    def has(self, key: str) -> bool:
        """Return whether something is under a key."""
        return key in self._nodes or self._place(key) is not None

    def _place(self, key: str) -> tuple[str, ZarrArray, Box] | None:
        """Return the tensor, its array and the box of a chunk's key."""
        node, _, rest = key.partition("/")
        if node not in self._arrays:
            return None
        name, array = self._arrays[node]
        parts = rest.split("/")
        index = tuple(int(part) for part in parts[1:] if part.isdecimal() and len(part) < 20)
        if array.key(index) != rest or len(index) != len(array.grid):
            return None
        if any(i >= n for i, n in zip(index, array.grid, strict=True)):
            return None
        offset = tuple(i * size for i, size in zip(index, array.chunk, strict=True))
        sizes = tuple(min(c, n - o) for c, n, o in zip(array.chunk, array.shape, offset, strict=True))
        return name, array, Box(offset, sizes)
