"""``.npz`` archives, and single ``.npy`` files, as snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.regions import Region, fill_region
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
from vescale_ckpt.interop.npz.header import NpyHeader, header_end, parse_npy_header
from vescale_ckpt.interop.npz.inflate import Inflated
from vescale_ckpt.interop.torchsave.directory import Member, read_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.regions import Bytes

_SUFFIX: Final = ".npy"
_FIRST_BYTES: Final = 12


class NpzSnapshot(ForeignSnapshot):
    """One archive; arrays in Fortran order, of the other byte order, and packed ones are read too.

    Raises:
        FormatError: it holds what are no plain numbers, which numpy would unpickle.
        CorruptionError, ObjectNotFoundError, StorageError: it is damaged or cannot be read.
    """

    format: ClassVar[str] = "npz"

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files)
        self._name = name
        self._tensors: dict[str, ForeignTensor] = {}
        self._arrays: dict[str, tuple[NpyHeader, Bytes, int]] = {}
        if name.endswith(_SUFFIX):
            self._add(name.removesuffix(_SUFFIX), files, 0, files.size(name))
            return
        for member in read_directory(files, name, allow_deflate=True).values():
            if not member.name.endswith(_SUFFIX):
                raise FormatError(f"cannot read {files.url}: its member {member.name[:80]!r} is no array", path=name)
            self._add(member.name.removesuffix(_SUFFIX), *self._opened(member), member.num_bytes)

    def _opened(self, member: Member) -> tuple[Bytes, int]:
        return (Inflated(self.files, self._name, member), 0) if member.is_deflated else (self.files, member.offset)

    def _add(self, name: str, source: Bytes, start: int, num_bytes: int) -> None:
        what = f"{name[:80]!r} of {self.files.url}"
        first = bytearray(min(_FIRST_BYTES, num_bytes))
        source.read_into(self._name, start, memoryview(first))
        end = header_end(bytes(first), what)
        text = bytearray(min(end, num_bytes))
        source.read_into(self._name, start, memoryview(text))
        header = parse_npy_header(bytes(text), num_bytes, what)
        self._tensors[name] = ForeignTensor(name, header.dtype, header.shape)
        self._arrays[name] = (header, source, start + header.data_start)

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        header, source, start = self._arrays[tensor.name]
        region = Region(self._name, start, header.dtype, header.shape, header.strides, header.big_endian)
        fill_region(source, region, box, out)
