"""A ByteCheckpoint folder as a snapshot: each part with a ``.metadata`` of its own, under that part's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.bytecheckpoint.part import ByteCheckpointPart
from vescale_ckpt.interop.dcp.table import METADATA_NAME
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.regions import Chunk
    from vescale_ckpt.state.tree import Key

PARTS: Final = ("model", "optimizer", "extra_state")


def part_names(names: Mapping[str, int]) -> list[str]:
    """Return the folders that are parts, by their tables."""
    return [part for part in PARTS if f"{part}/{METADATA_NAME}" in names]


class ByteCheckpointSnapshot(RegionSnapshot):
    """``model.<name>``, ``optimizer.<name>``: what the parts hold, under their names.

    Raises:
        FormatError: a table is none, or asks for what is no data.
        CorruptionError, ObjectNotFoundError, StorageError: it is damaged or cannot be read.
    """

    format: ClassVar[str] = "bytecheckpoint"

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._parts = {part: ByteCheckpointPart(files, part) for part in part_names(files.names())}
        if not self._parts:
            raise FormatError(f"cannot read {files.url}: it has none of the parts {', '.join(PARTS)}")
        self._tensors = {
            f"{part}.{name}": ForeignTensor(
                f"{part}.{name}", tensor.dtype, tensor.shape, None, (part, *(tensor.path or (name,)))
            )
            for part, inner in self._parts.items()
            for name, tensor in inner.tensors().items()
        }

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """What is no tensor, by name."""
        return {f"{part}.{name}": value for part, inner in self._parts.items() for name, value in inner.values.items()}

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state."""
        return {
            f"{part}.{name}": (part, *inner.value_paths.get(name, (name,)))
            for part, inner in self._parts.items()
            for name in inner.values
        }

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        part, _, name = tensor.name.partition(".")
        return self._parts[part].chunks_of(name)
