"""The packs of a survey: each footer against its name and against manifests, each byte against its digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vescale_ckpt.errors import CorruptionError, FormatError, ObjectNotFoundError, UnsupportedVersionError
from vescale_ckpt.execute.whole_pack import damaged_entries, read_whole_pack
from vescale_ckpt.repairing.assemble import Assembler
from vescale_ckpt.repairing.findings import Finding, Kind, RebuildPack
from vescale_storage import loop
from vescale_storage.keys import pack_key
from vescale_storage.pack import read_footer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vescale_ckpt.repairing.pack_table import PackTable
    from vescale_storage.backend import Backend
    from vescale_storage.pack import PackEntry

_NUM_NAMED = 5


class PackSurvey:
    """Looks at all packs of a store."""

    def __init__(
        self,
        backend: Backend,
        mirrors: Sequence[Backend],
        table: PackTable,
        listed: Mapping[str, int],
        *,
        deep: bool,
        progress: Callable[[str, int], None],
    ) -> None:
        self._backend = backend
        self._table = table
        self._listed = listed
        self._deep = deep
        self._progress = progress
        self._assembler = Assembler(backend, mirrors, listed)
        self._has_mirror = bool(mirrors)
        self.num_chunks = 0
        self.bytes_read = 0

    def look(self) -> list[Finding]:
        """Return what is wrong with packs that a snapshot needs; in a deep survey, with any."""
        found: list[Finding] = []
        names = dict.fromkeys([*self._table.sizes, *(self._listed if self._deep else ())])
        for number, name in enumerate(names, 1):
            found += self._look_at(name)
            self._progress("packs", number)
        return found

    def _look_at(self, name: str) -> Iterator[Finding]:
        size = self._table.sizes.get(name, self._listed.get(name, 0))
        try:
            entries = self._entries(name, size)
        except UnsupportedVersionError:
            raise
        except (FormatError, ObjectNotFoundError) as error:
            yield self._finding(name, size, error.message, self._table.whole(name))
            return
        self.num_chunks += len(entries)
        misplaced = self._table.misplaced(name, entries)
        if misplaced:
            # A manifest and a footer that are both whole and do not agree: a writer's fault, not the storage's.
            yield Finding(
                kind=Kind.PACK,
                key=pack_key(name),
                problem=f"manifests say of {len(misplaced)} chunks what its footer does not",
                outlook="nothing: both are as they were written; remove the snapshots",
                snapshots=self._holders(name),
            )
        if self._deep:
            whole = loop.run(read_whole_pack(self._backend, name, size))
            self.bytes_read += size
            damaged = damaged_entries(whole.body, whole.entries)
            if damaged:
                yield self._finding(name, size, f"{len(damaged)} of its {len(entries)} chunks are damaged", entries)

    def _entries(self, name: str, size: int) -> tuple[PackEntry, ...]:
        if name not in self._listed:
            raise CorruptionError("it is not there")
        if self._listed[name] != size:
            raise CorruptionError(f"it has {self._listed[name]} bytes, and had {size}")
        return loop.run(read_footer(self._backend, name, size))

    def _finding(self, name: str, size: int, problem: str, entries: tuple[PackEntry, ...] | None) -> Finding:
        fix, outlook = None, self._hopeless(name)
        if entries is None:
            entries = self._from_mirror(name, size)
        if entries is not None:
            _, lost = loop.run(self._assembler.assemble(name, size, entries))
            needed = {entry.digest for entry in self._table.entries(name)}
            gone = [entry for entry in lost if entry.digest in needed]
            if not lost:
                fix, outlook = (
                    RebuildPack(name, size, entries),
                    "it is put together again from sound copies of its chunks",
                )
            else:
                where = "in the store or its mirror" if self._has_mirror else "in the store"
                outlook = (
                    f"nothing: of {len(lost)} of its {len(entries)} chunks, {len(gone)} of them needed, no sound copy "
                    f"is left {where}; what else it holds can still be read"
                )
        return Finding(
            kind=Kind.PACK, key=pack_key(name), problem=problem, outlook=outlook, fix=fix, snapshots=self._holders(name)
        )

    def _from_mirror(self, name: str, size: int) -> tuple[PackEntry, ...] | None:
        return loop.run(self._assembler.footer(name, size))

    def _hopeless(self, name: str) -> str:
        known = len(self._table.entries(name))
        return (
            f"nothing: its footer is lost and manifests know {known} of its chunks and not all, so it cannot be made "
            "again under its name; what they know and is sound can still be read"
            if name in self._listed
            else "nothing: no copy of it is left; bring it back from a copy of the store, or remove the snapshots"
        )

    def _holders(self, name: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._table.holders.get(name, [])))
