"""Universal checkpoints of DeepSpeed: a folder a parameter, with its fp32 master and its moments whole."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import FormatError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.deepspeed.allowed import MAKERS
from vescale_ckpt.interop.foreign.regions import Chunk
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot
from vescale_ckpt.interop.torchsave.allowed import StoredTensor
from vescale_ckpt.interop.torchsave.archive import Archive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.interop.foreign.files import Files

PARAMETER_FILE: Final = re.compile(r"zero/([^/]+)/([a-z0-9_]+)\.pt")
_MASTER: Final = "fp32"
_TENSOR_KEY: Final = "param"


class UniversalSnapshot(RegionSnapshot):
    """``model.<name>`` are the fp32 masters, ``optimizer.<moment>.<name>`` the moments.

    Raises:
        FormatError: a file is none of such a checkpoint, or asks for what is no data.
        CorruptionError, StorageError: it is damaged or cannot be read.
    """

    format: ClassVar[str] = "deepspeed_universal"

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        self._tensors: dict[str, ForeignTensor] = {}
        self._places: dict[str, Chunk] = {}
        self._values: dict[str, Any] = {}
        for file in files.names():
            match = PARAMETER_FILE.fullmatch(file)
            if match:
                self._add(file, match[1], match[2])

    def _add(self, file: str, name: str, kind: str) -> None:
        archive = Archive(self.files, file, makers=MAKERS)
        value = archive.value
        tensor = value.get(_TENSOR_KEY) if isinstance(value, dict) else value
        path = ("model", name) if kind == _MASTER else ("optimizer", kind, name)
        full = ".".join(path)
        if isinstance(tensor, StoredTensor):
            region = archive.region(tensor)
            self._tensors[full] = ForeignTensor(full, tensor.dtype, tensor.shape, None, path)
            self._places[full] = Chunk(Box.whole(tensor.shape), lambda: region)
        elif isinstance(tensor, int | float):
            self._values[full] = tensor
        else:
            raise FormatError(f"cannot read {archive.what}: it holds neither a tensor nor a number", path=file)

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Steps that are plain numbers."""
        return self._values

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        return [self._places[tensor.name]]
