"""Target: one ``torch.save`` file, which ``torch.load(weights_only=True)`` takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.interop.convert.files import Layout, Part, TargetFile, tensor_parts
from vescale_ckpt.interop.convert.zips import ZipLayout, ZipMember
from vescale_ckpt.interop.foreign.regions import row_major
from vescale_ckpt.interop.torchsave.allowed import StoredStorage, StoredTensor
from vescale_ckpt.interop.torchsave.encode import encode_pickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_ckpt.interop.convert.options import ConvertOptions
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor


def archive_of(value: Any, members: list[ZipMember]) -> ZipLayout:
    """Return the archive of a value whose tensors are ``StoredTensor`` of the members."""
    return ZipLayout(
        [
            ZipMember.of("archive/data.pkl", encode_pickle(value)),
            ZipMember.of("archive/byteorder", b"little"),
            *members,
            ZipMember.of("archive/version", b"3\n"),
        ]
    )


def stored_whole(tensor: ForeignTensor, key: str) -> StoredTensor:
    """Return a tensor that has a storage of its own."""
    numel = tensor.num_bytes // tensor.dtype.itemsize
    storage = StoredStorage(key, tensor.dtype, numel)
    return StoredTensor(storage, tensor.dtype, 0, tensor.shape, row_major(tensor.shape))


def data_member(source: ForeignSnapshot, tensor: ForeignTensor, key: str, max_bytes: int) -> ZipMember:
    """Return the member that holds a tensor's bytes."""
    return ZipMember(f"archive/data/{key}", tensor.num_bytes, partial(tensor_parts, source, tensor, max_bytes))


def lay_out(source: ForeignSnapshot, options: ConvertOptions) -> Layout:
    """Return the one file: the state in its nesting, ties as tensors on one storage.

    Raises:
        InvalidInputError: two entries have one place in the state, or a value is none that a pickle may hold.
    """
    tensors = source.tensors()
    keys = {name: str(i) for i, name in enumerate(n for n, t in tensors.items() if t.alias_of is None)}
    state: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        _put(state, tensor.path or (name,), stored_whole(tensor, keys[tensor.alias_of or name]))
    for name, value in source.values.items():
        _put(state, source.value_paths.get(name, (name,)), value)
    members = [data_member(source, tensors[name], key, options.part_bytes) for name, key in keys.items()]
    return Layout([ArchiveFile(options.file_name or "model.pt", archive_of(state, members))])


def _put(state: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    at = state
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise InvalidInputError(f"cannot nest {path!r}: {key!r} is a value already")
    if path[-1] in at:
        raise InvalidInputError(f"cannot put two entries at {path!r}")
    at[path[-1]] = value


class ArchiveFile(TargetFile):
    """One archive as a file."""

    def __init__(self, name: str, archive: ZipLayout) -> None:
        self.name = name
        self.num_bytes = archive.num_bytes
        self._archive = archive

    def parts(self) -> Iterator[Part]:
        """Yield the parts of the archive."""
        yield from self._archive.parts()
