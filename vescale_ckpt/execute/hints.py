"""Hints: a small index object beside every manifest, by which a save finds chunks in snapshots that nobody named.

Reading all manifests of a store to deduplicate against all of them does not scale, so each commit also puts a sample
of its digests: all of a small snapshot, one in 64 of a large one. A saver reads the samples alone; where one of its
chunks is in a sample, it opens that one manifest, and finds the chunks around it there too (sparse indexing:
Lillibridge et al., "Sparse Indexing: Large Scale, Inline Deduplication Using Sampling and Locality", FAST 2009).
Nothing depends on a hint: one that is missing or damaged costs bytes and nothing else.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from vescale_ckpt.errors import CorruptionError, FormatError, NotFoundError, VeScaleError
from vescale_ckpt.format.manifest import decode_manifest, manifest_name
from vescale_storage import loop
from vescale_storage.digest import DIGEST_BYTES, digest
from vescale_storage.keys import INDEX_PREFIX, index_key, manifest_key, parse_index_key
from vescale_storage.parallel import map_bounded

if TYPE_CHECKING:
    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest
    from vescale_storage.backend import Backend, ObjectInfo

MAGIC: Final = b"\x89VSIDX\r\n"
VERSION: Final = 1
_HEAD: Final = struct.Struct(f"<8sII{DIGEST_BYTES}s")
SMALL_SNAPSHOT: Final = 4096
"""Up to so many chunks, all digests are hints."""
_SAMPLED_BELOW: Final = 4
"""Of a larger snapshot, those whose first byte is less: one in 64, the same ones whoever samples."""
_MOST_BYTES: Final = 64 << 20
_NUM_REQUESTS: Final = 32


def encode_hints(manifest: Manifest, name: str) -> bytes:
    """Return the index object of a manifest, which ``name`` names."""
    digests = np.unique(manifest.chunks.digest, axis=0)
    if len(digests) > SMALL_SNAPSHOT:
        digests = digests[digests[:, 0] < _SAMPLED_BELOW]
    body = _HEAD.pack(MAGIC, VERSION, len(digests), bytes.fromhex(name)) + digests.tobytes()
    return body + digest(body)


def decode_hints(data: bytes, name: str) -> npt.NDArray[np.uint8]:
    """Return the sampled digests, ``uint8[n, 32]``, of the manifest that ``name`` names.

    Raises:
        CorruptionError: these are not its hints.
    """
    body, check = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if len(body) < _HEAD.size or digest(body) != check:
        raise CorruptionError(f"cannot use {index_key(name)}: its bytes are not what was written")
    magic, version, count, owner = _HEAD.unpack_from(body)
    digests = np.frombuffer(body, np.uint8, offset=_HEAD.size)
    if magic != MAGIC or version != VERSION or owner.hex() != name or len(digests) != count * DIGEST_BYTES:
        raise CorruptionError(f"cannot use {index_key(name)}: it is no index of version {VERSION} of that manifest")
    return digests.reshape(-1, DIGEST_BYTES)


def put_hints(backend: Backend, manifest: Manifest, name: str) -> None:
    """Put the index object of a manifest that is committed.

    Raises:
        StorageError: the storage failed; only later deduplication misses it.
    """
    if len(manifest.chunks):
        loop.run(backend.put(index_key(name), [encode_hints(manifest, name)]))


class Hints:
    """The hints of one store: which manifest may have a chunk. For one thread at a time."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._words: dict[str, npt.NDArray[np.uint64]] = {}
        self._names: tuple[str, ...] = ()
        self._word = np.empty(0, np.uint64)
        self._source = np.empty(0, np.int64)

    def refresh(self) -> None:
        """Read the index objects that came since the last time; forget those that are gone."""
        listed = dict(loop.run(self._list()))
        new = [(name, info) for name, info in listed.items() if name not in self._words]
        self._words = {name: words for name, words in self._words.items() if name in listed}
        self._words.update(loop.run(map_bounded(self._read, new, _NUM_REQUESTS)))
        self._names = tuple(self._words)
        words = list(self._words.values())
        word = np.concatenate([np.empty(0, np.uint64), *words])
        source = np.repeat(np.arange(len(words)), [len(w) for w in words])
        order = np.argsort(word, kind="stable")
        self._word, self._source = word[order], source[order]

    def find(self, name: bytes) -> list[str]:
        """Return the names of the manifests whose hints have a digest's first eight bytes, the newest read last."""
        word = np.frombuffer(name[:8], "<u8")[0]
        begin, end = np.searchsorted(self._word, word), np.searchsorted(self._word, word, side="right")
        return [self._names[source] for source in self._source[begin:end]]

    def open(self, name: str) -> Manifest | None:
        """Return a manifest that ``find`` named, or None where it is gone or damaged."""
        try:
            data = loop.run(self._backend.get(manifest_key(name)))
            return decode_manifest(data) if manifest_name(data) == name else None
        except (NotFoundError, VeScaleError):
            return None

    async def _list(self) -> list[tuple[str, ObjectInfo]]:
        found = []
        async for info in self._backend.list(INDEX_PREFIX):
            with contextlib.suppress(FormatError):  # what is no index object is nobody's hint
                if info.size_bytes <= _MOST_BYTES:
                    found.append((parse_index_key(info.key), info))
        return found

    async def _read(self, item: tuple[str, ObjectInfo]) -> tuple[str, npt.NDArray[np.uint64]]:
        name, info = item
        try:
            digests = decode_hints(await self._backend.get(info.key), name)
        except (NotFoundError, CorruptionError):
            digests = np.empty((0, DIGEST_BYTES), np.uint8)
        return name, np.ascontiguousarray(digests[:, :8]).view("<u8").reshape(-1)
