"""Target: a zarr v3 group, a chunk a file, nothing packed."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.convert.files import Layout, Part, TargetFile
from vescale_ckpt.interop.zarr.chunks import chunk_bytes, padded
from vescale_ckpt.interop.zarr.nodes import NODE_NAME, ZarrArray, encode_array, encode_group, node_name
from vescale_ckpt.interop.zarr.view import chunk_shape
from vescale_ckpt.stage.raw import as_integers, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.interop.convert.options import ConvertOptions
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot
    from vescale_storage.backend import Buffer


def lay_out(source: ForeignSnapshot, options: ConvertOptions) -> Layout:
    """Return the chunks and the nodes. Tied tensors are written under every name: zarr has no ties.

    Raises:
        InvalidInputError: a dtype is none that zarr has anything for.
    """
    files: list[TargetFile] = []
    last: dict[str, bytes] = {}
    for name, tensor in source.tensors().items():
        chunk = chunk_shape(tensor.shape, tensor.dtype.itemsize, options.part_bytes // 2)
        array = ZarrArray(tensor.dtype, tensor.shape, chunk, "/", "c")
        node = node_name(name)
        last[f"{node}/{NODE_NAME}"] = encode_array(name, tensor.dtype, tensor.shape, chunk)
        files += [_ChunkFile(source, name, node, array, i) for i in itertools.product(*map(range, array.grid))]
    last[NODE_NAME] = encode_group()
    left_out = [(name, "a plain value") for name in source.values]
    return Layout(files, last, source.carried(), left_out)


class _ChunkFile(TargetFile):
    def __init__(
        self, source: ForeignSnapshot, tensor: str, node: str, array: ZarrArray, index: tuple[int, ...]
    ) -> None:
        self.name = f"{node}/{array.key(index)}"
        self.num_bytes = chunk_bytes(array)
        self._source, self._tensor, self._array, self._index = source, tensor, array, index

    def parts(self) -> Iterator[Part]:
        yield Part(self._make)

    def _make(self) -> Buffer:
        array = self._array
        offset = tuple(i * size for i, size in zip(self._index, array.chunk, strict=True))
        sizes = tuple(min(c, n - o) for c, n, o in zip(array.chunk, array.shape, offset, strict=True))
        whole = padded(as_integers(self._source.read(self._tensor, Box(offset, sizes))), array.chunk)
        return memory_of(whole.reshape(-1).view(torch.uint8))
