"""``to_zarr``: a read-only store for zarr-python over a snapshot."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.interop.zarr.view import ZarrView

if TYPE_CHECKING:
    from vescale_ckpt.interop.zarr.view import Tensors


def to_zarr(snapshot: Tensors, *, extensions: bool = False) -> Any:
    """Return a snapshot as a read-only zarr v3 store: ``zarr.open_group(to_zarr(snapshot), mode="r")``.

    Lazy: a chunk is read when zarr asks for it. Arrays are named as the tensors are. bfloat16, 8-bit floats and
    whatever else zarr-python lacks are unsigned integers of the same width with the attribute ``torch_dtype``;
    ``view.notes`` of the store names them.

    Args:
        snapshot: of a store, or foreign.
        extensions: show them under the names that zarr's registry of extensions has, which TensorStore reads.

    Raises:
        ConfigError: zarr is not installed.
    """
    try:
        from vescale_ckpt.interop.zarr.shell import SnapshotStore  # noqa: PLC0415 - zarr is optional
    except ImportError as error:
        raise ConfigError(f"cannot show a snapshot as zarr: {error}; pip install 'vescale-ckpt[arrays]'") from error
    return SnapshotStore(ZarrView(snapshot, extensions=extensions))


async def fetch(view: ZarrView, key: str) -> bytes | None:
    """Return what is under a key, read on a thread."""
    return await asyncio.to_thread(view.get, key)
