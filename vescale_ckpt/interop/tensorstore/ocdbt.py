"""An OCDBT database of TensorStore, as Orbax and others write it, as a snapshot. TensorStore itself reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from vescale_ckpt.errors import CorruptionError, FormatError, InvalidInputError
from vescale_ckpt.interop.foreign.local_files import LocalFiles
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
from vescale_ckpt.interop.tensorstore.values import fill, library, torch_dtype
from vescale_ckpt.interop.zarr.nodes import tensor_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.files import Files

MANIFEST_NAME: Final = "manifest.ocdbt"
_DRIVERS: Final = {".zarray": "zarr", "zarr.json": "zarr3"}
_CACHE_BYTES: Final = 16 << 20
_MAX_KEYS: Final = 5_000_000


class OcdbtSnapshot(ForeignSnapshot):
    """The zarr arrays, of either version, in a database on this machine; groups' and arrays' names joined by dots.

    Raises:
        InvalidInputError: it is on a remote place, which TensorStore would reach with credentials of its own.
        FormatError, CorruptionError: it is no such database, or damaged.
        ConfigError: TensorStore is not installed.
    """

    format: ClassVar[str] = "ocdbt"

    def __init__(self, files: Files) -> None:
        super().__init__(files)
        if not isinstance(files, LocalFiles):
            raise InvalidInputError(f"cannot read {files.url}: an OCDBT database is read from a local folder; copy it")
        self._ts = library()
        context = {"cache_pool": {"total_bytes_limit": _CACHE_BYTES}, "data_copy_concurrency": {"limit": 1}}
        self._context = self._ts.Context(context)
        self._base = f"file://{files.path(MANIFEST_NAME).parent}/"
        self._arrays: dict[str, Any] = {}
        self._tensors: dict[str, ForeignTensor] = {}
        for key in self._keys():
            folder, _, last = key.rpartition("/")
            if last in _DRIVERS:
                self._add(folder, last)

    def _keys(self) -> list[str]:
        try:
            store = self._ts.KvStore.open({"driver": "ocdbt", "base": self._base}, context=self._context).result()
            keys = store.list().result()
        except (ValueError, OSError) as error:
            raise FormatError(f"cannot read {self.url}: it is no OCDBT database: {error!s:.300}") from error
        if len(keys) > _MAX_KEYS:
            raise FormatError(f"cannot read {self.url}: it has {len(keys)} keys, at most {_MAX_KEYS} are read")
        return sorted(key.decode("utf-8", "surrogateescape") for key in keys)

    def _add(self, folder: str, last: str) -> None:
        what = f"{folder[:80]!r} of {self.url}"
        spec = {
            "driver": _DRIVERS[last],
            "kvstore": {"driver": "ocdbt", "base": self._base, "path": f"{folder}/" if folder else ""},
            "fill_missing_data_reads": False,
        }
        try:
            array = self._ts.open(spec, context=self._context, read=True, open=True).result()
        except (ValueError, OSError) as error:
            raise FormatError(f"cannot read {what}: {error!s:.300}") from error
        name = ".".join(map(tensor_name, folder.split("/")))
        if name in self._tensors:
            raise CorruptionError(f"cannot read {self.url}: two arrays are named {name[:80]!r}", fqn=name)
        dtype = torch_dtype(array.dtype.name, what)
        self._tensors[name] = ForeignTensor(name, dtype, tuple(array.shape))
        self._arrays[name] = array

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        array = self._arrays[tensor.name]
        try:
            found = array[box.slices].read(order="C").result() if box.ndim else array.read().result()
        except (ValueError, OSError) as error:
            raise CorruptionError(
                f"cannot read {tensor.name!r} of {self.url}: {error!s:.300}", fqn=tensor.name
            ) from error
        fill(out, found)
