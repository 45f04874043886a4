"""Target: a torch DCP folder, which ``torch.distributed.checkpoint.load`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vescale_ckpt.interop.convert.files import Layout, Part, TargetFile
from vescale_ckpt.interop.convert.options import cut_shards
from vescale_ckpt.interop.convert.to_torch_save import archive_of, data_member, stored_whole
from vescale_ckpt.interop.dcp.table import METADATA_NAME
from vescale_ckpt.interop.foreign.pickles import Named, Record
from vescale_ckpt.interop.torchsave.encode import encode_pickle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vescale_ckpt.interop.convert.options import ConvertOptions
    from vescale_ckpt.interop.convert.zips import ZipLayout
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor

_METADATA: Final = "torch.distributed.checkpoint.metadata"


def lay_out(source: ForeignSnapshot, options: ConvertOptions) -> Layout:
    """Return the files and the table. Tied tensors are written under every name: DCP has no ties.

    Raises:
        InvalidInputError: a value is none that a pickle may hold.
    """
    tensors = list(source.tensors().values())
    shards = cut_shards(tensors, options.max_shard_bytes or options.default_shard_bytes)
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    files: list[TargetFile] = []
    objects = dict(source.values)
    for number, shard in enumerate(shards or [[]]):
        name = f"__{number}_0.distcp"
        archives: list[ZipLayout] = []
        at = 0
        for tensor in shard:
            member = data_member(source, tensor, "0", options.part_bytes)
            archive = archive_of(stored_whole(tensor, "0"), [member])
            entries[tensor.name] = _tensor_entry(tensor)
            places[_index(tensor.name, torch.Size([0] * len(tensor.shape)))] = _place(name, at, archive)
            paths[tensor.name] = tensor.path or (tensor.name,)
            archives.append(archive)
            at += archive.num_bytes
        for key, value in (objects if number == 0 else {}).items():
            archive = archive_of(value, [])
            entries[key] = _record("BytesStorageMetadata")
            places[_index(key, None)] = _place(name, at, archive)
            paths[key] = source.value_paths.get(key, (key,))
            archives.append(archive)
            at += archive.num_bytes
        files.append(_Archives(name, archives))
    table = _record(
        "Metadata",
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=places,
        storage_meta=None,
    )
    return Layout(files, {METADATA_NAME: encode_pickle(table)}, source.carried())


def _record(name: str, **state: Any) -> Record:
    return Record(Named(_METADATA, name), (), state)


def _index(name: str, offset: torch.Size | None) -> Record:
    return _record("MetadataIndex", fqn=name, offset=offset, index=None if offset is None else 0)


def _place(file: str, offset: int, archive: ZipLayout) -> Record:
    cls = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    return Record(cls, (), {"relative_path": file, "offset": offset, "length": archive.num_bytes})


def _tensor_entry(tensor: ForeignTensor) -> Record:
    layout = Record(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    memory_format = Record(Named(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Record(
        Named(_METADATA, "TensorProperties"), (), {}, (tensor.dtype, layout, False, memory_format, False)
    )
    size = torch.Size(tensor.shape)
    chunk = _record("ChunkStorageMetadata", offsets=torch.Size([0] * len(size)), sizes=size)
    return _record("TensorStorageMetadata", properties=properties, size=size, chunks=[chunk])


class _Archives(TargetFile):
    def __init__(self, name: str, archives: Sequence[ZipLayout]) -> None:
        self.name = name
        self._archives = archives
        self.num_bytes = sum(archive.num_bytes for archive in archives)

    def parts(self) -> Iterator[Part]:
        for archive in self._archives:
            yield from archive.parts()
