"""What manifests say of packs: which chunk lies where, gathered by pack, in the very layout of a pack's footer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from vescale_storage.digest import DIGEST_BYTES, hexdigest
from vescale_storage.pack import Codec, PackEntry, encode_footer, footer_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest

ENTRY: Final = np.dtype([("digest", f"V{DIGEST_BYTES}"), ("offset", "<u8"), ("length", "<u4"), ("codec", "u1")])


class PackTable:
    """Gathers the chunks of manifests by pack; each place counts once."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        """Of every pack that a manifest names."""
        self.holders: dict[str, list[str]] = {}
        """Pack -> snapshots that need it."""
        self._rows: dict[str, npt.NDArray[np.void]] = {}

    def add(self, manifest: Manifest, name: str) -> None:
        """Take the chunks of one more manifest; ``name`` is its snapshot's."""
        chunks = manifest.chunks
        rows = np.empty(len(chunks), ENTRY)
        rows["digest"] = np.ascontiguousarray(chunks.digest).view(f"V{DIGEST_BYTES}").reshape(-1)
        rows["offset"], rows["length"], rows["codec"] = chunks.offset, chunks.length, chunks.codec
        order = np.argsort(chunks.pack, kind="stable")
        starts = np.searchsorted(chunks.pack[order], np.arange(len(manifest.packs) + 1))
        for number, pack in enumerate(manifest.packs):
            self.sizes[pack.name] = pack.size_bytes
            self.holders.setdefault(pack.name, []).append(name)
            mine = rows[order[starts[number] : starts[number + 1]]]
            known = self._rows.get(pack.name, np.empty(0, ENTRY))
            self._rows[pack.name] = _unique(np.concatenate([known, mine]))

    def entries(self, pack: str) -> tuple[PackEntry, ...]:
        """Return the chunks that manifests know of a pack, by offset."""
        return tuple(
            PackEntry(bytes(digest), offset, length, Codec(codec))
            for digest, offset, length, codec in self._rows.get(pack, np.empty(0, ENTRY)).tolist()
        )

    def whole(self, pack: str) -> tuple[PackEntry, ...] | None:
        """Return all entries of a pack whose footer is lost, proven by its name; None where manifests know only some.

        A pack is named by the digest of its footer, so what has this digest is its footer.
        """
        entries = self.entries(pack)
        if not entries or footer_bytes(len(entries)) + entries[-1].offset + entries[-1].length != self.sizes[pack]:
            return None
        return entries if hexdigest(encode_footer(entries)) == pack else None

    def misplaced(self, pack: str, footer: Sequence[PackEntry]) -> list[PackEntry]:
        """Return the chunks that manifests know and that a pack's footer does not list so."""
        listed = set(footer)
        return [entry for entry in self.entries(pack) if entry not in listed]


def _unique(rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return rows by offset, each once; two that differ in anything are two."""
    if not len(rows):
        return rows
    rows = rows[np.argsort(rows["offset"], kind="stable")]
    as_bytes = np.ascontiguousarray(rows).view(f"V{ENTRY.itemsize}")
    is_new = np.ones(len(rows), np.bool_)
    is_new[1:] = as_bytes[1:] != as_bytes[:-1]
    return rows[is_new]
