"""A ``torch.save`` file as a snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign.flatten import flatten
from vescale_ckpt.interop.foreign.regions import Chunk
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor, RegionSnapshot
from vescale_ckpt.interop.torchsave.allowed import BASE, StoredTensor
from vescale_ckpt.interop.torchsave.archive import Archive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.torchsave.allowed import Make
    from vescale_ckpt.state.tree import Key


def is_stored_tensor(value: Any) -> bool:
    """Return whether a value of an archive is a tensor."""
    return isinstance(value, StoredTensor)


class TorchSaveSnapshot(RegionSnapshot):
    """One file that ``torch.save`` wrote; tensors that share a storage in the same way are tied.

    Raises:
        FormatError, CorruptionError, ObjectNotFoundError, StorageError: as for ``Archive``.
    """

    format: ClassVar[str] = "torch_save"

    def __init__(self, files: Files, name: str, makers: Mapping[str, Make] = BASE) -> None:
        super().__init__(files)
        self._archive = Archive(files, name, makers=makers)
        flat = flatten(self._archive.value, is_stored_tensor, self._archive.what, self._archive.pickle_bytes)
        self._values, self._value_paths = flat.values, flat.value_paths
        self._tensors: dict[str, ForeignTensor] = {}
        self._regions: dict[str, Chunk] = {}
        first: dict[StoredTensor, str] = {}
        for name_, (path, tensor) in flat.tensors.items():
            region = self._archive.region(tensor)
            owner = first.setdefault(tensor, name_)
            alias = None if owner == name_ or 0 in tensor.shape else owner
            self._tensors[name_] = ForeignTensor(name_, tensor.dtype, tensor.shape, alias, path)
            self._regions[name_] = Chunk(Box.whole(tensor.shape), lambda region=region: region)  # type: ignore[misc]

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values by dotted name."""
        return self._values

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state."""
        return self._value_paths

    def _chunks(self, tensor: ForeignTensor) -> Sequence[Chunk]:
        return [self._regions[tensor.name]]
