"""The ``.metadata`` of a torch DCP folder, read as data: which boxes of which tensors lie where.

torch reads this file with a full unpickler, so whoever can write it can run code in whoever loads it. Here it is read
by a machine that runs nothing, and everything it says is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from vescale_ckpt.errors import CorruptionError, FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.files import check_name
from vescale_ckpt.interop.foreign.pickles import Record, load_pickle
from vescale_ckpt.interop.torchsave.allowed import DTYPES, with_records
from vescale_ckpt.state.dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.interop.torchsave.allowed import Make
    from vescale_ckpt.state.tree import Key

METADATA_NAME: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_CLASSES: Final = (
    *(f"{_METADATA}.{name}" for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
)  # fmt: skip
MAKERS: Final[Mapping[str, Make]] = with_records(*_CLASSES)


@dataclass(frozen=True, slots=True)
class Item:
    """Where one thing lies: a range of a file that is a ``torch.save`` archive."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor and its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Item], ...]


@dataclass(frozen=True, slots=True)
class DcpTable:
    """What a ``.metadata`` says, all of it checked but for what only the files can tell."""

    tensors: Mapping[str, DcpTensor]
    objects: Mapping[str, Item]
    """Names of what is no tensor."""
    paths: Mapping[str, tuple[Key, ...]]
    """Name -> path in the state, where the planner kept it."""
    extra: Mapping[str, Any]
    """Fields that other writers add."""


def read_table(data: bytes, what: str, makers: Mapping[str, Make] = MAKERS, prefix: str = "") -> DcpTable:
    """Return what a ``.metadata`` says.

    Args:
        data: the file.
        what: its name, for messages.
        makers: what it may name.
        prefix: of the files' names, which are relative to the table's folder.

    Raises:
        FormatError: it is no such pickle, or asks for what is no data.
        CorruptionError: it contradicts itself.
    """
    root = load_pickle(data, what, makers, constants=DTYPES)
    if not isinstance(root, Record) or root.cls.name != "Metadata":
        raise FormatError(f"cannot read {what}: it holds no Metadata but a {type(root).__name__}", path=what)
    entries, storage = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise FormatError(f"cannot read {what}: its state_dict_metadata or storage_data is no dict", path=what)
    places = _places(storage, what, prefix)
    tensors: dict[str, DcpTensor] = {}
    objects: dict[str, Item] = {}
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, Record):
            raise FormatError(f"cannot read {what}: its entry {str(name)[:80]!r} is none", path=what)
        if entry.cls.name == "TensorStorageMetadata":
            tensors[name] = _tensor(name, entry, places, what)
        elif entry.cls.name == "BytesStorageMetadata":
            item = places.get((name, None))
            if item is None:
                raise CorruptionError(f"cannot read {what}: it does not say where {name[:80]!r} lies", fqn=name)
            objects[name] = item
        else:
            raise FormatError(f"cannot read {what}: {name[:80]!r} is a {entry.cls.full[:80]}", path=what)
    known = {"state_dict_metadata", "storage_data", "planner_data"}
    extra = {key: value for key, value in root.state.items() if key not in known}
    return DcpTable(tensors, objects, _paths(root.get("planner_data")), extra)


def _places(storage: dict[Any, Any], what: str, prefix: str) -> dict[tuple[str, tuple[int, ...] | None], Item]:
    places: dict[tuple[str, tuple[int, ...] | None], Item] = {}
    for key, info in storage.items():
        name = key.get("fqn") if isinstance(key, Record) else None
        fields = info.state if isinstance(info, Record) else {}
        file, offset, length = fields.get("relative_path"), fields.get("offset", -1), fields.get("length", -1)
        if not isinstance(name, str) or not _are_sizes((offset, length)):
            raise FormatError(f"cannot read {what}: its storage_data has the entry {str(name)[:80]!r}", path=what)
        if fields.get("transform_descriptors"):
            raise FormatError(
                f"cannot read {what}: {name[:80]!r} was written through {fields['transform_descriptors']!r:.80}; only "
                "items that torch.save wrote are read",
                fqn=name,
            )
        at = key.get("offset")
        where = (name, None if at is None else _sizes(at, what))
        if where in places:
            raise CorruptionError(f"cannot read {what}: it stores {name[:80]!r} at {where[1]} twice", fqn=name)
        places[where] = Item(prefix + check_name(file, what), offset, length)
    return places


def _tensor(
    name: str, entry: Record, places: Mapping[tuple[str, tuple[int, ...] | None], Item], what: str
) -> DcpTensor:
    properties = entry.get("properties")
    fields = properties.raw_state if isinstance(properties, Record) else None
    dtype = fields[0] if isinstance(fields, tuple) and fields else getattr(properties, "state", {}).get("dtype")
    if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in DTYPE_NAMES:
        raise FormatError(f"cannot read {what}: {name[:80]!r} has the dtype {str(dtype)[:40]}", fqn=name)
    shape = _sizes(entry.get("size"), what)
    chunks: list[tuple[Box, Item]] = []
    listed = entry.get("chunks")
    for chunk in listed if isinstance(listed, list) else ():
        state = chunk.state if isinstance(chunk, Record) else {}
        offsets, sizes = _sizes(state.get("offsets"), what), _sizes(state.get("sizes"), what)
        if not len(offsets) == len(sizes) == len(shape):
            raise CorruptionError(f"cannot read {what}: a chunk of {name[:80]!r} has another number of dims", fqn=name)
        box, item = Box(offsets, sizes), places.get((name, offsets))
        if not Box.whole(shape).contains(box):
            raise CorruptionError(f"cannot read {what}: the chunk {box} of {name[:80]!r} is not in {shape}", fqn=name)
        if item is None:
            if box.volume:
                raise CorruptionError(
                    f"cannot read {what}: it does not say where {box} of {name[:80]!r} lies", fqn=name
                )
            continue
        chunks.append((box, item))
    return DcpTensor(dtype, shape, tuple(chunks))


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(type(value) is int and 0 <= value < 2**62 for value in values)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not _are_sizes(value):
        raise FormatError(f"cannot read {what}: {str(value)[:80]} are no sizes", path=what)
    return tuple(value)


def _paths(planner: Any) -> dict[str, tuple[Key, ...]]:
    """Return the paths that the planner kept; anything else it kept is nothing to us."""
    if not isinstance(planner, dict):
        return {}
    return {
        name: path
        for name, path in planner.items()
        if isinstance(name, str) and isinstance(path, tuple) and all(isinstance(key, str | int) for key in path)
    }
