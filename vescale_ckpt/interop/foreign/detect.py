"""What a foreign checkpoint is, by what lies there, and its snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vescale_ckpt.errors import ConfigError, FormatError
from vescale_ckpt.interop.bytecheckpoint.snapshot import ByteCheckpointSnapshot, part_names
from vescale_ckpt.interop.dcp.folder import DcpSnapshot
from vescale_ckpt.interop.dcp.table import METADATA_NAME
from vescale_ckpt.interop.deepspeed.universal import PARAMETER_FILE, UniversalSnapshot
from vescale_ckpt.interop.deepspeed.zero import OPTIMIZER_FILE, ZeroSnapshot
from vescale_ckpt.interop.foreign.places import open_files
from vescale_ckpt.interop.megatron.dist import COMMON_NAME, MegatronDistSnapshot
from vescale_ckpt.interop.megatron.ranks import RANK_FILE, MegatronRanksSnapshot
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
    partition: Mapping[str, str] | None = None,
) -> ForeignSnapshot:
    """Return a checkpoint of another library, opened in place; nothing that it says is run.

    Args:
        url: a file or a folder; a path or any fsspec URL.
        format: what it is; None looks.
        storage_options: passed to the file system.
        partition: for classic Megatron files, how tensor parallelism cut what is not Megatron's own: regular expression
            of names -> ``rows``, ``columns``, ``gated_rows`` or ``copied``.

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
        found = format or (_file_format(files, name) if name else _folder_format(files))
        if found == MegatronRanksSnapshot.format:
            return MegatronRanksSnapshot(files, partition)
        return _OPENERS[found](files, name)
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
    found = _by_marks(names)
    if found is not None:
        return found
    if any(name.endswith((SUFFIX, f"{SUFFIX}.index.json")) and "/" not in name for name in names):
        return "safetensors"
    some = ", ".join(repr(name[:80]) for name in list(names)[:5])
    raise FormatError(f"cannot open {files.url}: it is no checkpoint that is known; it has {some or 'no files'}")


def _by_marks(names: Mapping[str, int]) -> str | None:
    """Return what a folder is by files that only one format has."""
    if METADATA_NAME in names:
        return "megatron_dist" if COMMON_NAME in names else "dcp"
    marks: tuple[tuple[str, Callable[[str], object]], ...] = (
        ("ocdbt", lambda name: name == MANIFEST_NAME),
        ("zarr", lambda name: name == NODE_NAME),
        ("megatron_ranks", RANK_FILE.fullmatch),
        ("deepspeed_universal", PARAMETER_FILE.fullmatch),
        ("deepspeed_zero", OPTIMIZER_FILE.fullmatch),
    )
    found = next((format_name for format_name, fits in marks if any(fits(name) for name in names)), None)
    return found or ("bytecheckpoint" if part_names(names) else None)


_OPENERS: Final[dict[str, Callable[[Files, str], ForeignSnapshot]]] = {
    "bytecheckpoint": lambda files, _: ByteCheckpointSnapshot(files),
    "deepspeed_universal": lambda files, _: UniversalSnapshot(files),
    "deepspeed_zero": lambda files, _: ZeroSnapshot(files),
    "megatron_dist": lambda files, _: MegatronDistSnapshot(files),
    "megatron_ranks": lambda files, _: MegatronRanksSnapshot(files),
    "npz": NpzSnapshot,
    "ocdbt": lambda files, _: OcdbtSnapshot(files),
    "zarr": lambda files, _: ZarrSnapshot(files),
    "dcp": lambda files, _: DcpSnapshot(files),
    "safetensors": SafetensorsSnapshot,
    "torch_save": TorchSaveSnapshot,
}
FORMATS: Final = tuple(_OPENERS)
"""What ``open_foreign`` takes as ``format``."""
