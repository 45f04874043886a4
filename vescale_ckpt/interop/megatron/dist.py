"""A ``torch_dist`` checkpoint of Megatron-core: a DCP folder, and beside it what all ranks have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.format.json_text import decode_json
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.dcp.folder import DcpSnapshot
from vescale_ckpt.interop.foreign.flatten import flatten
from vescale_ckpt.interop.foreign.regions import Chunk
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor
from vescale_ckpt.interop.megatron.allowed import MAKERS
from vescale_ckpt.interop.torchsave.archive import Archive
from vescale_ckpt.interop.torchsave.snapshot import is_stored_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.interop.foreign.files import Files

COMMON_NAME: Final = "common.pt"
CONFIG_NAME: Final = "metadata.json"
BACKEND: Final = "torch_dist"


class MegatronDistSnapshot(DcpSnapshot):
    """One iteration's folder.

    Tensors have the names and the shapes that Megatron-core stored: in many models one tensor holds a parameter of all
    layers, with the layers as its first dim.

    Raises:
        FormatError: it was written by another backend than ``torch_dist``, or asks for what is no data.
        CorruptionError, ObjectNotFoundError, StorageError: it is damaged or cannot be read.
    """

    format: ClassVar[str] = "megatron_dist"

    def __init__(self, files: Files) -> None:
        if files.has(CONFIG_NAME):
            config = decode_json(files.read_all(CONFIG_NAME, 1 << 20), f"{CONFIG_NAME} of {files.url}", floats=True)
            found = config.get("sharded_backend") if isinstance(config, dict) else None
            if found != BACKEND:
                raise FormatError(
                    f"cannot read {files.url}: its tensors were written by {str(found)[:40]!r}; {BACKEND} is read",
                    path=files.url,
                )
        super().__init__(files, object_makers=MAKERS)
        self._common = Archive(files, COMMON_NAME, makers=MAKERS)
        flat = flatten(self._common.value, is_stored_tensor, self._common.what, self._common.pickle_bytes)
        self._common_values = flat.values
        self._common_paths = flat.value_paths
        self._common_regions: dict[str, Chunk] = {}
        for name, (path, tensor) in flat.tensors.items():
            if name in self._tensors:
                raise FormatError(f"cannot read {files.url}: {name[:80]!r} is both in {COMMON_NAME} and sharded")
            region = self._common.region(tensor)
            self._tensors[name] = ForeignTensor(name, tensor.dtype, tensor.shape, None, path)
            self._common_regions[name] = Chunk(Box.whole(tensor.shape), lambda region=region: region)  # type: ignore[misc]

    @property
    def values(self) -> Mapping[str, Any]:
        """What is no tensor: what ranks stored for themselves, and what all have in common (arguments, iteration)."""
        return {**super().values, **self._common_values}

    @property
    def value_paths(self) -> Mapping[str, tuple[Any, ...]]:
        """Where plain values lie in the state."""
        return {**super().value_paths, **self._common_paths}

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        common = self._common_regions.get(tensor.name)
        return super()._chunks(tensor) if common is None else [common]
