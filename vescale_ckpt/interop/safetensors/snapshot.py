"""safetensors as a snapshot: one file, or a Hugging Face folder, at any URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vescale_ckpt.errors import FormatError, NotFoundError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.regions import Chunk, Region, row_major
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot, small_files
from vescale_ckpt.interop.safetensors.dtypes import torch_dtype, torch_shape
from vescale_ckpt.interop.safetensors.folder import (
    INDEX_NAME,
    SINGLE_NAME,
    SUFFIX,
    Index,
    check_index,
    is_one_of_several,
    merge_ties,
    parse_index,
)
from vescale_ckpt.interop.safetensors.header import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    SafetensorsHeader,
    TensorEntry,
    header_length,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.interop.foreign.files import Files


class SafetensorsSnapshot(RegionSnapshot):
    """The weights of a file or folder, all headers read and checked.

    Raises:
        NotFoundError: files that the index names are not there, or nobody can tell which belong together.
        FormatError: a file or the index is not what it should be; nothing outside the folder is opened.
        CorruptionError: a file was cut or changed.
        StorageError: it cannot be read.
    """

    format: ClassVar[str] = "safetensors"

    def __init__(self, files: Files, name: str = "") -> None:
        super().__init__(files)
        names, index = ([name], None) if name else self._choose()
        headers = {file: _header(files, file) for file in names}
        where: dict[str, str] = {}
        for file, header in headers.items():
            for tensor in header.tensors:
                if where.setdefault(tensor, file) != file:
                    raise FormatError(
                        f"cannot read {self.url}: {tensor[:80]!r} is both in {where[tensor]} and in {file}", fqn=tensor
                    )
        described: list[tuple[str, Mapping[str, object]]] = [(f, h.metadata) for f, h in headers.items()]
        if index is not None:
            check_index(index, where)
            described.append((INDEX_NAME, index.metadata))
        self.shards: Mapping[str, tuple[str, ...]] = {file: tuple(h.tensors) for file, h in headers.items()}
        """File name -> names of the tensors in it."""
        self._metadata = {key: value for _, entries in described for key, value in entries.items()}
        self._headers, self._where = headers, where
        self._tensors = {tensor: self._describe(tensor, headers[file]) for tensor, file in where.items()}
        for tied, stored in merge_ties(described, where).items():
            owner = self._tensors[stored]
            self._tensors[tied] = ForeignTensor(tied, owner.dtype, owner.shape, stored)

    def _choose(self) -> tuple[list[str], Index | None]:
        top = [name for name in self.files.names() if "/" not in name]
        if SINGLE_NAME in top:
            return [SINGLE_NAME], None
        if INDEX_NAME in top:
            index = parse_index(self.files.read_all(INDEX_NAME, MAX_HEADER_BYTES), f"{INDEX_NAME} of {self.url}")
            return list(dict.fromkeys(index.weight_map.values())), index
        found = [name for name in top if name.endswith(SUFFIX)]
        if len(found) == 1 and not is_one_of_several(found[0]):
            return found, None
        raise NotFoundError(
            f"cannot read {self.url}: it has {len(found)} {SUFFIX} files and no {INDEX_NAME} that says which belong "
            "together; pass the path of one file",
            path=self.url,
        )

    def _describe(self, name: str, header: SafetensorsHeader) -> ForeignTensor:
        entry = header.tensors[name]
        dtype, shape = torch_dtype(entry.dtype), torch_shape(entry.dtype, entry.shape)
        if dtype is None or shape is None:
            raise FormatError(
                f"cannot read {name[:80]!r} of {self.url}: torch has no tensors of {entry.dtype} with shape "
                f"{entry.shape}",
                fqn=name,
            )
        return ForeignTensor(name, dtype, shape)

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the headers and the index say beside the tensors."""
        return self._metadata

    def carried(self) -> tuple[str, ...]:
        """Return the names of the configuration and tokenizer files beside the weights."""
        return tuple(name for name in small_files(self.files) if name != INDEX_NAME)

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        file = self._where[tensor.name]
        header = self._headers[file]
        entry: TensorEntry = header.tensors[tensor.name]
        start = header.data_start + entry.start
        region = Region(file, start, tensor.dtype, tensor.shape, row_major(tensor.shape))
        return [Chunk(Box.whole(tensor.shape), lambda: region)]


def _header(files: Files, name: str) -> SafetensorsHeader:
    what = f"{files.url}/{name}" if not files.url.endswith(name) else files.url
    size = files.size(name)
    length = header_length(files.read(name, 0, min(LENGTH_BYTES, size)), size, what)
    return parse_header(files.read(name, LENGTH_BYTES, length), size - LENGTH_BYTES - length, what)
