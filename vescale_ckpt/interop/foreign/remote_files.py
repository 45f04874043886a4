"""The files under a prefix of an object store, or of anything else that fsspec knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.errors import FormatError
from vescale_ckpt.interop.foreign.files import MAX_FILES, SCRATCH_PREFIX, Files, check_name
from vescale_storage import loop

if TYPE_CHECKING:
    from vescale_storage.backend import Backend


class RemoteFiles(Files):
    """Objects under a prefix."""

    def __init__(self, backend: Backend, *, only: str = "") -> None:
        super().__init__(f"{backend.url}/{only}" if only else backend.url)
        self._backend = backend
        self._only = only
        self._heads: dict[str, tuple[int, float]] = {}

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        return self._head(name)[0]

    def _head(self, name: str) -> tuple[int, float]:
        if name not in self._heads:
            info = loop.run(self._backend.head(check_name(name, self.url)))
            self._heads[name] = (info.size_bytes, info.modified_seconds)
        return self._heads[name]

    def _read_into(self, name: str, offset: int, out: memoryview) -> None:
        loop.run(self._backend.get_into(name, offset, out))

    def _modified(self, name: str) -> float:
        return self._head(name)[1]

    def _list(self) -> dict[str, int]:
        if self._only:
            return {self._only: self.size(self._only)}

        async def collect() -> dict[str, int]:
            found: dict[str, int] = {}
            async for info in self._backend.list(""):
                if not info.key.startswith(SCRATCH_PREFIX):
                    found[info.key] = info.size_bytes
                if len(found) > MAX_FILES:
                    raise FormatError(f"cannot read {self.url}: it has more than {MAX_FILES} files")
            return found

        return loop.run(collect())

    def close(self) -> None:
        """Release the connections."""
        loop.run(self._backend.close())
