"""What a foreign checkpoint is, by what lies there, and its snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import ConfigError, FormatError
from vescale_ckpt.interop.dcp.folder import DcpSnapshot
from vescale_ckpt.interop.dcp.table import METADATA_NAME
from vescale_ckpt.interop.foreign.places import open_files
from vescale_ckpt.interop.npz.header import MAGIC
from vescale_ckpt.interop.npz.snapshot import NpzSnapshot
from vescale_ckpt.interop.safetensors.folder import SUFFIX
from vescale_ckpt.interop.safetensors.snapshot import SafetensorsSnapshot
from vescale_ckpt.interop.tensorstore.ocdbt import MANIFEST_NAME, OcdbtSnapshot
from vescale_ckpt.interop.torchsave.snapshot import TorchSaveSnapshot
from vescale_ckpt.interop.zarr.nodes import NODE_NAME
from vescale_ckpt.interop.zarr.snapshot import ZarrSnapshot

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from vescale_ckpt.interop.foreign.files import Files
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot

_ZIP: Final = b"PK\x03\x04"


def open_foreign(
    url: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - the word of the field
    storage_options: Mapping[str, Any] | None = None,
) -> ForeignSnapshot:
    """Return a checkpoint of another library, opened in place; nothing that it says is run.

    Args:
        url: a file or a folder; a path or any fsspec URL.
        format: what it is; None looks.
        storage_options: passed to the file system.

    Raises:
        NotFoundError: nothing is there.
        FormatError: it is nothing that is known, or not what it should be.
        CorruptionError: it is damaged.
        StorageError: it cannot be read.
    """
    if format is not None and format not in _OPENERS:
        raise ConfigError(f"cannot open {url} as {format!r}: known are {', '.join(sorted(_OPENERS))}")
    files, name = open_files(url, storage_options)
    try:
        return _OPENERS[format or (_file_format(files, name) if name else _folder_format(files))](files, name)
    except BaseException:
        files.close()
        raise


def _file_format(files: Files, name: str) -> str:
    head = files.read(name, 0, min(8, files.size(name)))
    if name.endswith(SUFFIX):
        return "safetensors"
    if head.startswith(_ZIP) and not name.endswith(".npz"):
        return "torch_save"
    if head.startswith((_ZIP, MAGIC)):
        return "npz"
    raise FormatError(
        f"cannot open {files.url}: it is neither safetensors nor numpy's, nor an archive that "
        "torch.save writes since torch 1.6",
        path=name,
    )


def _folder_format(files: Files) -> str:
    names = files.names()
    if METADATA_NAME in names:
        return "dcp"
    if any(name.endswith((SUFFIX, f"{SUFFIX}.index.json")) and "/" not in name for name in names):
        return "safetensors"
    if MANIFEST_NAME in names:
        return "ocdbt"
    if NODE_NAME in names:
        return "zarr"
    some = ", ".join(repr(name[:80]) for name in list(names)[:5])
    raise FormatError(f"cannot open {files.url}: it is no checkpoint that is known; it has {some or 'no files'}")


_OPENERS: Final[dict[str, Callable[[Files, str], ForeignSnapshot]]] = {
    "npz": NpzSnapshot,
    "ocdbt": lambda files, _: OcdbtSnapshot(files),
    "zarr": lambda files, _: ZarrSnapshot(files),
    "dcp": lambda files, _: DcpSnapshot(files),
    "safetensors": SafetensorsSnapshot,
    "torch_save": TorchSaveSnapshot,
}
FORMATS: Final = tuple(_OPENERS)
"""What ``open_foreign`` takes as ``format``."""
