"""A torch DCP folder as a snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.interop.dcp.table import MAKERS, METADATA_NAME, DcpTable, Item, read_table
from vescale_ckpt.interop.foreign.flatten import plain
from vescale_ckpt.interop.foreign.pickles import MAX_PICKLE_BYTES
from vescale_ckpt.interop.foreign.regions import Chunk, Region, row_major
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot, small_files
from vescale_ckpt.interop.torchsave.allowed import BASE, StoredTensor
from vescale_ckpt.interop.torchsave.archive import Archive

if TYPE_CHECKING:
    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.torchsave.allowed import Make
    from vescale_ckpt.state.tree import Key

_REGIONS_KEPT: Final = 100_000


class DcpSnapshot(RegionSnapshot):
    """A folder that ``torch.distributed.checkpoint.save`` wrote, or another program in its manner.

    Every file is checked to hold what ``.metadata`` says is in it.

    Raises:
        FormatError: ``.metadata`` is none, asks for what is no data, or leads out of the folder.
        CorruptionError: it contradicts itself or the files.
        ObjectNotFoundError, StorageError: something is missing or cannot be read.
    """

    format: ClassVar[str] = "dcp"

    def __init__(
        self,
        files: Files,
        makers: Mapping[str, Make] = MAKERS,
        object_makers: Mapping[str, Make] = BASE,
        *,
        prefix: str = "",
    ) -> None:
        super().__init__(files)
        self._object_makers = object_makers
        text = files.read_all(f"{prefix}{METADATA_NAME}", MAX_PICKLE_BYTES)
        self.table: DcpTable = read_table(text, f"{prefix}{METADATA_NAME} of {files.url}", makers, prefix)
        self._check_files()
        self._tensors = {
            name: ForeignTensor(name, tensor.dtype, tensor.shape, None, self.table.paths.get(name, ()))
            for name, tensor in self.table.tensors.items()
        }
        self._regions: dict[Item, Region] = {}

    def _check_files(self) -> None:
        ends: dict[str, int] = {}
        items = [item for tensor in self.table.tensors.values() for _, item in tensor.chunks]
        for item in [*items, *self.table.objects.values()]:
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        for name, end in ends.items():
            size = self.files.size(name)
            if size < end:
                raise CorruptionError(
                    f"cannot read {self.url}: {name!r} has {size} bytes, {METADATA_NAME} puts things up to byte {end} "
                    "into it; it was cut",
                    path=name,
                )

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """What is no tensor, by name; read when it is asked for."""
        return _Objects(self)

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state."""
        return {name: path for name, path in self.table.paths.items() if name in self.table.objects}

    def carried(self) -> tuple[str, ...]:
        """Return the names of configuration files that lie beside."""
        return small_files(self.files)

    def load_object(self, name: str) -> Any:
        """Return one value that is no tensor.

        Raises:
            FormatError: it is no plain value.
            CorruptionError, StorageError: it cannot be read.
        """
        item = self.table.objects[name]
        archive = Archive(self.files, item.file, start=item.offset, length=item.length, makers=self._object_makers)
        return plain(archive.value, archive.what, archive.pickle_bytes)

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        return [
            Chunk(box, lambda box=box, item=item: self._region(tensor, box, item))  # type: ignore[misc]
            for box, item in self.table.tensors[tensor.name].chunks
        ]

    def _region(self, tensor: ForeignTensor, box: Box, item: Item) -> Region:
        found = self._regions.get(item)
        if found is None:
            archive = Archive(self.files, item.file, start=item.offset, length=item.length)
            stored = archive.value
            if not isinstance(stored, StoredTensor):
                raise FormatError(f"cannot read {tensor.name!r} of {self.url}: it is stored as no tensor")
            _check_same(stored, tensor.dtype, box, f"{tensor.name!r} of {self.url}")
            found = archive.region(stored)
            if stored.shape != box.shape:
                found = dataclasses.replace(found, shape=box.shape, strides=row_major(box.shape))
            if len(self._regions) < _REGIONS_KEPT:
                self._regions[item] = found
        return found


def _check_same(stored: StoredTensor, dtype: torch.dtype, box: Box, what: str) -> None:
    """Refuse another tensor than the table says; dims of size 1 that a writer has added to the box are fine."""
    same = stored.shape == box.shape or (
        [n for n in stored.shape if n != 1] == [n for n in box.shape if n != 1]
        and stored.strides == row_major(stored.shape)
    )
    if stored.dtype != dtype or not same:
        raise CorruptionError(
            f"cannot read {what}: {METADATA_NAME} says that the chunk at {box.offset} is {dtype} {box.shape}, its file "
            f"has {stored.dtype} {stored.shape}"
        )


class _Objects(Mapping[str, Any]):
    """The values of a folder, each read when it is asked for."""

    def __init__(self, snapshot: DcpSnapshot) -> None:
        self._snapshot = snapshot

    def __getitem__(self, name: str) -> Any:
        return self._snapshot.load_object(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.table.objects)

    def __len__(self) -> int:
        return len(self._snapshot.table.objects)
