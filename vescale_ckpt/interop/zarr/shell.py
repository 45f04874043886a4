"""The store class of zarr-python; imported only where zarr is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest

from vescale_ckpt.interop.zarr.store import fetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from vescale_ckpt.interop.zarr.view import ZarrView


class SnapshotStore(Store):  # type: ignore[misc]
    """A snapshot, read-only."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, view: ZarrView) -> None:
        super().__init__(read_only=True)
        self.view = view
        self._is_open = True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotStore) and other.view is self.view

    def __hash__(self) -> int:
        return hash(id(self.view))

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Return what is under a key, or a range of it."""
        data = await fetch(self.view, key)
        return None if data is None else prototype.buffer.from_bytes(_cut(data, byte_range))

    async def get_partial_values(self, prototype: Any, key_ranges: Iterable[tuple[str, Any]]) -> list[Any]:
        """Return ranges of several keys."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Return whether something is under a key."""
        return self.view.has(key)

    async def set(self, key: str, value: Any) -> None:
        """Refuse: a snapshot does not change."""
        del key, value
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refuse: a snapshot does not change."""
        del key
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield every key."""
        for key in self.view.keys():  # noqa: SIM118 - it is no dict
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield every key that begins so."""
        for key in self.view.keys():  # noqa: SIM118 - it is no dict
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names right below a prefix."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        if not start:
            for name in ("zarr.json", *self.view.nodes()):
                yield name
            return
        seen = set()
        for key in self.view.keys():  # noqa: SIM118 - it is no dict
            name = key.removeprefix(start).partition("/")[0]
            if key.startswith(start) and name not in seen:
                seen.add(name)
                yield name


def _cut(data: bytes, byte_range: Any) -> bytes:
    if isinstance(byte_range, RangeByteRequest):
        return data[byte_range.start : byte_range.end]
    if isinstance(byte_range, OffsetByteRequest):
        return data[byte_range.offset :]
    if isinstance(byte_range, SuffixByteRequest):
        return data[-byte_range.suffix :]
    return data
