"""Target: safetensors, as Hugging Face has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.format.json_text import encode_json
from vescale_ckpt.interop.convert.files import Layout, Part, TargetFile, tensor_parts
from vescale_ckpt.interop.convert.options import ConvertOptions, cut_shards
from vescale_ckpt.interop.safetensors.dtypes import file_shape, num_bytes, safetensors_dtype
from vescale_ckpt.interop.safetensors.folder import INDEX_NAME, SINGLE_NAME
from vescale_ckpt.interop.safetensors.header import METADATA_KEY, TensorEntry, encode_header
from vescale_ckpt.interop.safetensors.ties import encode_ties, other_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor


def lay_out(source: ForeignSnapshot, options: ConvertOptions) -> Layout:
    """Return the files: one, or several with an index; ties are stored once and their names recorded.

    Raises:
        InvalidInputError: a tensor cannot be in safetensors.
    """
    tensors = source.tensors()
    stored = [tensor for tensor in tensors.values() if tensor.alias_of is None]
    ties = {tensor.name: tensor.alias_of for tensor in tensors.values() if tensor.alias_of is not None}
    _refuse(stored, source.url)
    shards = _shards(source, stored, options)
    said = other_metadata(source.metadata, ties)
    files: list[TargetFile] = []
    for name, shard in shards.items():
        names = {tensor.name for tensor in shard}
        tied = {left_out: kept for left_out, kept in ties.items() if kept in names}
        metadata = {"format": "pt", **said, **encode_ties(tied)}
        files.append(_SafetensorsFile(name, source, shard, metadata, options.part_bytes))
    last = {}
    if len(files) > 1:
        weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        total = sum(tensor.num_bytes for tensor in stored)
        last[INDEX_NAME] = encode_json(
            {"metadata": {"total_size": total, **encode_ties(ties)}, "weight_map": weight_map}
        )
    left_out = [(name, "a plain value") for name in source.values]
    return Layout(files, last, () if options.file_name else source.carried(), left_out)


def _shards(
    source: ForeignSnapshot, stored: Sequence[ForeignTensor], options: ConvertOptions
) -> dict[str, list[ForeignTensor]]:
    """Return the tensors by file; a source of the same format keeps its own files."""
    if options.file_name:
        return {options.file_name: list(stored)}
    kept: Mapping[str, Sequence[str]] = getattr(source, "shards", {})
    if len(kept) > 1 and options.max_shard_bytes is None:
        return {file: [source.tensors()[name] for name in names] for file, names in kept.items() if names}
    cut = cut_shards(stored, options.max_shard_bytes or options.default_shard_bytes)
    if len(cut) == 1:
        return {SINGLE_NAME: cut[0]}
    return {f"model-{i:05d}-of-{len(cut):05d}.safetensors": shard for i, shard in enumerate(cut, 1)}


def _refuse(stored: Sequence[ForeignTensor], url: str) -> None:
    problems = []
    for tensor in stored:
        format_name = safetensors_dtype(tensor.dtype)
        if format_name is None or file_shape(format_name, tensor.shape) is None or tensor.name == METADATA_KEY:
            problems.append(f"{tensor.name[:80]!r} ({tensor.dtype}, shape {tensor.shape})")
    if problems:
        raise InvalidInputError(
            f"cannot convert {url} to safetensors, which cannot hold {', '.join(problems[:5])}"
            + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
            + "; cast or drop them with a key map",
            problems=tuple(problems),
        )


class _SafetensorsFile(TargetFile):
    def __init__(
        self,
        name: str,
        source: ForeignSnapshot,
        shard: Sequence[ForeignTensor],
        metadata: Mapping[str, str],
        max_bytes: int,
    ) -> None:
        self.name = name
        self._source = source
        self._max_bytes = max_bytes
        # Wide items first: then every tensor starts at a multiple of its item size.
        self._tensors = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
        entries = []
        end = 0
        for tensor in self._tensors:
            format_name = safetensors_dtype(tensor.dtype) or ""
            shape = file_shape(format_name, tensor.shape) or ()
            size = num_bytes(format_name, shape) or 0
            entries.append(TensorEntry(tensor.name, format_name, shape, end, end + size))
            end += size
        self._header = encode_header(entries, metadata)
        self.num_bytes = len(self._header) + end

    def parts(self) -> Iterator[Part]:
        yield Part(lambda: self._header)
        for tensor in self._tensors:
            for make in tensor_parts(self._source, tensor, self._max_bytes):
                yield Part(make)
