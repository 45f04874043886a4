"""One part of a ByteCheckpoint folder: a table like torch DCP's, and items that are a tensor's bytes and nothing else.

Older writers of the same family (veScale's) wrapped every item as ``torch.save`` does; both are read. Which one it is
the item's length tells: the bytes of a box, or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from vescale_ckpt.interop.dcp.folder import DcpSnapshot
from vescale_ckpt.interop.dcp.table import MAKERS
from vescale_ckpt.interop.foreign.regions import Region, row_major
from vescale_ckpt.interop.torchsave.allowed import with_records

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.dcp.table import Item
    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.regions import Chunk
    from vescale_ckpt.interop.foreign.snapshot import ForeignTensor
    from vescale_ckpt.interop.torchsave.allowed import Make

_MODULES: Final = ("bytecheckpoint.checkpointer.meta_type", "vescale.checkpoint.planner.common")
_CLASSES: Final = ("Metadata", "_StorageInfo", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                   "TensorProperties", "MetadataIndex", "STATE_DICT_TYPE")  # fmt: skip
_MAKERS: Final[Mapping[str, Make]] = with_records(*(f"{m}.{c}" for m in _MODULES for c in _CLASSES), base=MAKERS)


class ByteCheckpointPart(DcpSnapshot):
    """The folder ``part`` of a checkpoint; arguments and errors as for ``DcpSnapshot``."""

    format: ClassVar[str] = "bytecheckpoint_part"

    def __init__(self, files: Files, part: str) -> None:
        super().__init__(files, _MAKERS, prefix=f"{part}/")

    def chunks_of(self, name: str) -> Sequence[Chunk]:
        """Return the chunks of a tensor."""
        return self._chunks(self._tensors[name])

    def _region(self, tensor: ForeignTensor, box: Box, item: Item) -> Region:
        if item.length == box.volume * tensor.dtype.itemsize:
            return Region(item.file, item.offset, tensor.dtype, box.shape, row_major(box.shape))
        return super()._region(tensor, box, item)
