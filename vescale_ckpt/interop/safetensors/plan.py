"""The export plan: which tensors of a snapshot go to which file, under which names, in which dtype.

Pure: made of a manifest alone, without reading any data, so that it can be shown before anything is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from vescale_ckpt.errors import ConfigError, InvalidInputError, NotFoundError
from vescale_ckpt.format.json_text import encode_json
from vescale_ckpt.interop.safetensors.dtypes import file_shape, num_bytes, safetensors_dtype
from vescale_ckpt.interop.safetensors.folder import INDEX_NAME, SINGLE_NAME
from vescale_ckpt.interop.safetensors.header import METADATA_KEY, TensorEntry, encode_header
from vescale_ckpt.interop.safetensors.ties import encode_ties
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.leaf import LeafKind
from vescale_ckpt.state.tree import DictNode, ValueNode, walk
from vescale_ckpt.state.tree import fqn as dotted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vescale_ckpt.format.records import Manifest, TensorRecord

CASTABLE: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What ``dtype`` casts, and to what. Integers stay, and so do 8-bit and 4-bit floats, which mean nothing without the
scales beside them."""
DEFAULT_SUBTREE: Final = "model"
DEFAULT_SHARD_BYTES: Final = 5 * 10**9
_ARRAYS: Final = frozenset({LeafKind.TENSOR, LeafKind.NUMPY})
_MAX_FILES: Final = 99_999


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What to export and how."""

    select: str | None = None
    """Dotted name of the subtree whose tensors are exported, under names relative to it. None: ``model`` where the
    snapshot has that, else everything; an empty string: everything."""
    dtype: torch.dtype | None = None
    """Cast floating-point tensors of 16 bits and more to this, as ``Tensor.to`` does; None: as they are."""
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    """A file's tensors are at most this large together; a larger tensor has a file of its own."""

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ConfigError(f"cannot export with max_shard_bytes={self.max_shard_bytes}: it must be positive")
        if self.dtype is not None and self.dtype not in CASTABLE:
            allowed = ", ".join(str(dtype) for dtype in CASTABLE)
            raise ConfigError(f"cannot export with dtype={self.dtype}: only {allowed}")


@dataclass(frozen=True, slots=True)
class ExportTensor:
    """One tensor that is written."""

    index: int
    """In the manifest's tensor table."""
    entry: TensorEntry
    """Its place in its file."""
    stored: torch.dtype
    dtype: torch.dtype
    """In the file; the same as ``stored`` unless it is cast."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.entry.name


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file that is written."""

    name: str
    header: bytes = field(repr=False)
    """Its first bytes."""
    tensors: tuple[ExportTensor, ...]
    """In the order of their bytes."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(tensor.entry.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Everything that an export will do."""

    snapshot: str
    """``run@step``."""
    select: str
    """The subtree that is exported; an empty string for everything."""
    files: tuple[ExportFile, ...]
    index: bytes | None = field(repr=False)
    """The index's content, where there are several files."""
    ties: Mapping[str, str]
    """Name left out -> name written."""
    left_out: tuple[tuple[str, str], ...]
    """(name, why) of what is in the subtree and cannot be in safetensors."""

    @property
    def tensors(self) -> Iterable[ExportTensor]:
        """Every tensor, file by file."""
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(tensor.entry.num_bytes for tensor in self.tensors)

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files) + len(self.index or b"")

    @property
    def casts(self) -> tuple[ExportTensor, ...]:
        """The tensors that are cast."""
        return tuple(tensor for tensor in self.tensors if tensor.dtype != tensor.stored)


def plan_export(manifest: Manifest, options: ExportOptions | None = None) -> ExportPlan:
    """Return what an export of a snapshot will do.

    Raises:
        NotFoundError: there is nothing at ``options.select``, or no tensor.
        InvalidInputError: tensors cannot be written: two have one name, or safetensors lacks their dtype; lists all.
    """
    options = options or ExportOptions()
    select = _default_subtree(manifest) if options.select is None else options.select.strip(".")
    snapshot = f"{manifest.run}@{manifest.step}"
    selected, left_out = _select(manifest, select)
    if not selected:
        raise NotFoundError(_nothing(manifest, select, left_out), snapshot=snapshot, fqn=select)
    written, ties = _split_ties(manifest, selected)
    _refuse_unwritable(manifest, selected, snapshot)
    sized = [_sized(manifest, index, name, options.dtype) for name, index in written]
    shards = _cut_shards(sized, options.max_shard_bytes)
    files = tuple(_file(number, len(shards), shard, ties) for number, shard in enumerate(shards, 1))
    index = _index(files, ties) if len(files) > 1 else None
    return ExportPlan(snapshot, select, files, index, ties, left_out)


def _default_subtree(manifest: Manifest) -> str:
    tree = manifest.tree
    has_model = isinstance(tree, DictNode) and any(key == DEFAULT_SUBTREE for key, _ in tree.items)
    return DEFAULT_SUBTREE if has_model else ""


def _relative(name: str, select: str) -> str | None:
    """Return a name below the selected one, its last part for the selected one itself, None for any other."""
    if not select:
        return name
    if name == select:
        return name.rsplit(".", 1)[-1]
    return name.removeprefix(f"{select}.") if name.startswith(f"{select}.") else None


def _select(manifest: Manifest, select: str) -> tuple[list[tuple[str, int]], tuple[tuple[str, str], ...]]:
    """Return (name in the file, index) of the tensors to export, and (name, why) of the rest of the subtree."""
    selected: list[tuple[str, int]] = []
    left_out: list[tuple[str, str]] = []
    for index, record in enumerate(manifest.tensors):
        name = _relative(record.fqn, select)
        if name is None:
            continue
        if record.kind in _ARRAYS:
            selected.append((name, index))
        else:
            left_out.append((name, "bytes, not a tensor"))
    for path, node in walk(manifest.tree):
        if isinstance(node, ValueNode) and path and (name := _relative(dotted(path), select)) is not None:
            left_out.append((name, "a plain value"))
    return selected, tuple(left_out)


def _nothing(manifest: Manifest, select: str, left_out: Sequence[tuple[str, str]]) -> str:
    snapshot = f"{manifest.run}@{manifest.step}"
    if not select:
        return f"cannot export {snapshot}: it has no tensors"
    if left_out:
        return f"cannot export {select!r} of {snapshot}: it holds no tensors, only {len(left_out)} other values"
    tops = list(dict.fromkeys(str(record.path[0]) for record in manifest.tensors if record.path))
    shown = ", ".join(repr(name[:80]) for name in tops[:8]) + (", ..." if len(tops) > 8 else "")
    return f"cannot export {select!r} of {snapshot}: it has no such name; there are tensors below {shown or 'nothing'}"


def _split_ties(
    manifest: Manifest, selected: Sequence[tuple[str, int]]
) -> tuple[list[tuple[str, int]], dict[str, str]]:
    """Return what is written, and for every other name of the same tensor the name that is."""
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    written: list[tuple[str, int]] = []
    for name, index in selected:
        kept = first.setdefault(manifest.resolve(index), name)
        if kept == name:
            written.append((name, index))
        else:
            ties[name] = kept
    return written, ties


def _refuse_unwritable(manifest: Manifest, selected: Sequence[tuple[str, int]], snapshot: str) -> None:
    problems: list[str] = []
    seen: dict[str, TensorRecord] = {}
    for name, index in selected:
        record = manifest.tensors[index]
        other = seen.setdefault(name, record)
        if other is not record:
            problems.append(f"{other.path!r} and {record.path!r} would both be named {name!r}")
        if name == METADATA_KEY:
            problems.append(f"{record.path!r} would be named {name!r}, which the format keeps for itself")
        format_name = safetensors_dtype(dtype_from_name(record.dtype))
        if format_name is None:
            problems.append(f"{name!r} is {record.dtype}, which safetensors does not have")
        elif file_shape(format_name, record.shape) is None:
            problems.append(f"{name!r} is a 0-d {record.dtype}, which safetensors cannot hold")
    if problems:
        raise InvalidInputError(
            f"cannot export {snapshot} to safetensors: {'; '.join(problems[:5])}"
            + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            + "; select another subtree",
            problems=tuple(problems),
            snapshot=snapshot,
        )


@dataclass(frozen=True, slots=True)
class _Sized:
    """A tensor to write, without its place."""

    name: str
    index: int
    stored: torch.dtype
    dtype: torch.dtype
    format_name: str
    shape: tuple[int, ...]
    num_bytes: int


def _sized(manifest: Manifest, index: int, name: str, cast_to: torch.dtype | None) -> _Sized:
    record = manifest.tensors[index]
    stored = dtype_from_name(record.dtype)
    dtype = cast_to if cast_to is not None and stored in CASTABLE else stored
    format_name = safetensors_dtype(dtype) or ""
    shape = file_shape(format_name, record.shape) or ()
    return _Sized(name, index, stored, dtype, format_name, shape, num_bytes(format_name, shape) or 0)


def _cut_shards(tensors: Sequence[_Sized], max_bytes: int) -> list[list[_Sized]]:
    """Return the tensors in files, in their order; a file takes tensors until the next would be too much."""
    shards: list[list[_Sized]] = []
    filled = 0
    for tensor in tensors:
        if not shards or (filled + tensor.num_bytes > max_bytes and filled):
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    if len(shards) > _MAX_FILES:
        raise ConfigError(f"cannot export {len(shards)} files: at most {_MAX_FILES}; raise max_shard_bytes={max_bytes}")
    return shards


def _file(number: int, num_files: int, shard: Sequence[_Sized], ties: Mapping[str, str]) -> ExportFile:
    # Wide items first: then every tensor starts at a multiple of its item size, as readers that map files like it.
    tensors: list[ExportTensor] = []
    end = 0
    for sized in sorted(shard, key=lambda sized: -sized.dtype.itemsize):
        entry = TensorEntry(sized.name, sized.format_name, sized.shape, end, end + sized.num_bytes)
        end = entry.stop
        tensors.append(ExportTensor(sized.index, entry, sized.stored, sized.dtype))
    names = {tensor.name for tensor in tensors}
    tied = {name: stored for name, stored in ties.items() if stored in names}
    header = encode_header((tensor.entry for tensor in tensors), {"format": "pt", **encode_ties(tied)})
    name = SINGLE_NAME if num_files == 1 else f"model-{number:05d}-of-{num_files:05d}.safetensors"
    return ExportFile(name, header, tuple(tensors))


def _index(files: Sequence[ExportFile], ties: Mapping[str, str]) -> bytes:
    total = sum(tensor.entry.num_bytes for file in files for tensor in file.tensors)
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    return encode_json({"metadata": {"total_size": total, **encode_ties(ties)}, "weight_map": weight_map})


__all__ = [
    "CASTABLE",
    "DEFAULT_SHARD_BYTES",
    "INDEX_NAME",
    "ExportFile",
    "ExportOptions",
    "ExportPlan",
    "ExportTensor",
    "plan_export",
]
