"""Roots: all that refs and tags lead to, read whole and proven, or an error that stops the collection."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_storage import loop
from vescale_storage.digest import hexdigest
from vescale_storage.errors import CorruptionError, FormatError, ObjectNotFoundError
from vescale_storage.keys import REFS_PREFIX, manifest_key, parse_ref_key, parse_tag_key
from vescale_storage.parallel import map_bounded
from vescale_storage.ref_records import Ref, Tag, decode_ref, decode_tag
from vescale_storage.sealed import read_listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TypeAlias

    from vescale_storage.backend import Backend, ObjectInfo

    PacksOf: TypeAlias = Callable[[bytes], Iterable[str]]
    """Returns the names of the packs that a manifest, given as its bytes, refers to; raises FormatError."""

_NUM_RECORDS: Final = 32
"""Refs and tags read at once."""
_INLINE_BYTES: Final = 64 << 10
"""A smaller manifest is looked at on the loop: to hand it to a thread would take longer."""
_NUM_MANIFESTS: Final = 4
"""Manifests read at once: each can have a hundred megabytes."""


@dataclass(frozen=True, slots=True)
class Roots:
    """What must not be deleted, and why."""

    refs: tuple[Ref, ...]
    """All versions of all steps of all runs, by key."""
    tags: tuple[Tag, ...]
    """Of all runs, by key."""
    packs_of: dict[str, frozenset[str]]
    """Manifest -> its packs."""
    packs: frozenset[str]

    def names_of(self, manifest: str) -> list[str]:
        """Return the snapshots and tags that have a manifest, for messages."""
        return [f"{ref.run}@{ref.step}" for ref in self.refs if ref.manifest == manifest] + [
            f"{tag.ref.run}@{tag.name}" for tag in self.tags if tag.ref.manifest == manifest
        ]


class RootReader:
    """Reads roots; what a manifest says is kept, as it never changes, so that a second reading costs little."""

    def __init__(self, backend: Backend, packs_of: PacksOf) -> None:
        self._backend = backend
        self._packs_of = packs_of
        self._known: dict[str, frozenset[str]] = {}
        self._names: dict[str, str] = {}
        """One string for each pack, however many manifests refer to it."""

    async def read(self, progress: Callable[[str, int], None] | None = None) -> Roots:
        """Return the roots of now.

        A ref or tag that is deleted meanwhile may be among them or not.

        Raises:
            CorruptionError, FormatError, UnsupportedVersionError: a ref, a tag or a manifest cannot be read, or
                something unknown lies among the refs; names it. Nobody can tell then what is needed.
            StorageError: the storage failed.
        """
        infos = await self._listed()
        found = await map_bounded(self._record, infos, _NUM_RECORDS)
        refs = tuple(record for record in found if isinstance(record, Ref))
        tags = tuple(record for record in found if isinstance(record, Tag))
        holders: dict[str, list[Ref | Tag]] = {}
        for ref in refs:
            holders.setdefault(ref.manifest, []).append(ref)
        for tag in tags:
            holders.setdefault(tag.ref.manifest, []).append(tag)
        read = functools.partial(self._manifest, holders, progress)
        done = [name for name in await map_bounded(read, holders, _NUM_MANIFESTS) if name is not None]
        self._known = {name: self._known[name] for name in done}
        return Roots(refs, tags, dict(self._known), frozenset().union(*self._known.values()))

    async def _listed(self) -> list[ObjectInfo]:
        """Return all refs and tags, from two listings together.

        A snapshot that is tagged and whose ref is then deleted, or that gets a new version before the old one is
        deleted, is never without a root; but one listing that passes over both places could miss both. The second one
        begins after the first has ended, so it shows what was put before something vanished from the first.
        """
        infos: dict[str, ObjectInfo] = {}
        for _ in range(2):
            async for info in self._backend.list(REFS_PREFIX):
                infos[info.key] = info
        strange = [key for key in infos if not _is_root(key)]
        if strange:
            raise FormatError(
                f"cannot collect in {self._backend.url}: {len(strange)} keys are neither refs nor tags, so nobody can "
                f"tell what they need: {', '.join(map(ascii, strange[:20]))}; remove them, or upgrade vescale-ckpt; "
                "nothing was deleted",
                keys=tuple(strange),
            )
        return [infos[key] for key in sorted(infos)]

    async def _record(self, info: ObjectInfo) -> Ref | Tag | None:
        try:
            if _is_tag(info.key):
                return await read_listed(self._backend, info, decode_tag)
            return await read_listed(self._backend, info, decode_ref)
        except ObjectNotFoundError:
            return None  # deleted meanwhile
        except FormatError as error:
            raise self._stop(error, info.key) from error

    async def _manifest(
        self, holders: dict[str, list[Ref | Tag]], progress: Callable[[str, int], None] | None, name: str
    ) -> str | None:
        if name not in self._known:
            key = manifest_key(name)
            try:
                data = await self._backend.get(key)
                if len(data) <= _INLINE_BYTES:
                    found = _packs_of(self._packs_of, data, name)
                else:
                    found = await loop.run_blocking(_packs_of, self._packs_of, data, name)
                self._known[name] = frozenset(self._names.setdefault(pack, pack) for pack in found)
            except ObjectNotFoundError:
                if not await self._any_left(holders[name]):
                    return None  # its last ref is gone as well
                missing = CorruptionError(f"{key!r} is not there", key=key)
                raise self._stop(missing, key, holders[name]) from None
            except FormatError as error:
                raise self._stop(error, key, holders[name]) from error
            if progress is not None:
                progress("manifests read", len(self._known))
        return name

    async def _any_left(self, holders: Iterable[Ref | Tag]) -> bool:
        for holder in holders:
            try:
                await self._backend.head(holder.key)
            except ObjectNotFoundError:
                continue
            return True
        return False

    def _stop(self, error: FormatError, key: str, holders: Iterable[Ref | Tag] = ()) -> FormatError:
        names = [_name_of(holder) for holder in holders]
        needs = f", which {', '.join(names[:5])}{' and others need' if len(names) > 5 else ' needs'}" if names else ""
        return type(error)(
            f"cannot collect in {self._backend.url}: {key!r}{needs} cannot be read: {error} - so nobody can tell which "
            f"packs are needed; bring it back from a copy, or delete {'that snapshot' if names else 'it'}; nothing was "
            "deleted",
            key=key,
            snapshots=tuple(names),
        )


def _packs_of(packs_of: PacksOf, data: bytes, name: str) -> frozenset[str]:
    """Return the packs of a manifest after its digest was found right."""
    if hexdigest(data) != name:
        raise CorruptionError(f"its {len(data)} bytes do not have the digest in its name", key=manifest_key(name))
    return frozenset(packs_of(data))


def _name_of(holder: Ref | Tag) -> str:
    if isinstance(holder, Ref):
        return f"{holder.run}@{holder.step}"
    return f"{holder.ref.run}@{holder.name}"


def _is_root(key: str) -> bool:
    if _is_tag(key):
        return True
    try:
        parse_ref_key(key)
    except FormatError:
        return False
    return True


def _is_tag(key: str) -> bool:
    try:
        parse_tag_key(key)
    except FormatError:
        return False
    return True
