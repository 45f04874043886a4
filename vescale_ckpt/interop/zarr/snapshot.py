"""A zarr v3 group as a snapshot. A chunk that is not there is an error, never zeros."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vescale_ckpt.errors import CorruptionError, NotFoundError
from vescale_ckpt.interop.foreign.regions import Region, fill_region, row_major
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor, small_files
from vescale_ckpt.interop.zarr.chunks import chunk_bytes, chunks_of, unpack
from vescale_ckpt.interop.zarr.nodes import NAME_ATTRIBUTE, NODE_NAME, ZarrArray, decode_node, tensor_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files

_MAX_NODE_BYTES = 16 << 20


class ZarrSnapshot(ForeignSnapshot):
    """A group, or groups in groups, of arrays; names are joined by dots.

    Raises:
        FormatError: a node is none, or uses what is not read here.
        ObjectNotFoundError, StorageError: it cannot be read.
    """

    format: ClassVar[str] = "zarr"

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._tensors: dict[str, ForeignTensor] = {}
        self._arrays: dict[str, tuple[str, ZarrArray]] = {}
        self._attributes: dict[str, Any] = {}
        for file in files.names():
            folder, _, last = f"/{file}".rpartition("/")
            if last != NODE_NAME:
                continue
            folder = folder.removeprefix("/")
            array, attributes = decode_node(files.read_all(file, _MAX_NODE_BYTES), f"{file!r} of {files.url}")
            if array is None:
                self._attributes |= {} if folder else attributes
                continue
            given = attributes.get(NAME_ATTRIBUTE)
            name = given if isinstance(given, str) else ".".join(map(tensor_name, folder.split("/")))
            if name in self._tensors:
                raise CorruptionError(f"cannot read {files.url}: two arrays are named {name[:80]!r}", fqn=name)
            self._tensors[name] = ForeignTensor(name, array.dtype, array.shape)
            self._arrays[name] = (f"{folder}/" if folder else "", array)

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Attributes of the outermost group."""
        return self._attributes

    def carried(self) -> tuple[str, ...]:
        """Return the names of configuration files that lie beside."""
        return tuple(name for name in small_files(self.files) if name != NODE_NAME)

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        folder, array = self._arrays[tensor.name]
        for index, chunk in chunks_of(array, box):
            common = chunk.intersect(box)
            if common is not None:
                self._fill_chunk(
                    folder + array.key(index), array, common.relative_to(chunk), out[common.relative_to(box).slices]
                )

    def _fill_chunk(self, key: str, array: ZarrArray, box: Box, out: torch.Tensor) -> None:
        region = Region(key, 0, array.dtype, array.chunk, row_major(array.chunk), array.big_endian)
        try:
            size = self.files.size(key)
        except NotFoundError as error:
            raise CorruptionError(
                f"cannot read {key!r} of {self.url}: the chunk is not there; zarr would show its fill value, which "
                "nobody can tell from a lost chunk",
                path=key,
            ) from error
        if not array.codecs:
            if size != chunk_bytes(array):
                raise CorruptionError(
                    f"cannot read {key!r} of {self.url}: a chunk has {chunk_bytes(array)} bytes, this one {size}",
                    path=key,
                )
            fill_region(self.files, region, box, out)
            return
        fill_region(_Unpacked(unpack(self.files.read_all(key), array, key)), region, box, out)


class _Unpacked:
    def __init__(self, data: bytearray) -> None:
        self._data = memoryview(data)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        del name
        out[:] = self._data[offset : offset + len(out)]
