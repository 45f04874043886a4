"""Refs and tags: the small create-only objects that make snapshots visible.

A ref names the manifest of one version of ``run@step``; putting it is the commit. Saving a step again makes the next
version, and readers take the highest, so nothing is ever replaced. A tag is a named copy of a ref: it protects its step
from deletion and never moves.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from vescale_storage.errors import ConflictError, FormatError, ObjectNotFoundError, RefNotFoundError
from vescale_storage.keys import (
    MAX_VERSION,
    REFS_PREFIX,
    RefKey,
    parse_ref_key,
    parse_tag_key,
    ref_key,
    run_prefix,
    step_prefix,
    tag_key,
    tags_prefix,
)
from vescale_storage.parallel import map_bounded
from vescale_storage.ref_records import (
    Ref,
    SnapshotName,
    Tag,
    decode_ref,
    decode_tag,
    encode_ref,
    encode_tag,
    parse_name,
)
from vescale_storage.sealed import MAX_RECORD_BYTES, put_once, read_bounded, read_listed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vescale_storage.backend import Backend, ObjectInfo

__all__ = [
    "Ref",
    "SnapshotName",
    "Tag",
    "create_ref",
    "decode_ref",
    "decode_tag",
    "delete_ref",
    "delete_tag",
    "encode_ref",
    "encode_tag",
    "latest_ref",
    "list_ref_keys",
    "list_refs",
    "list_runs",
    "list_tags",
    "parse_name",
    "read_ref",
    "read_ref_version",
    "read_tag",
    "resolve",
    "set_tag",
]

_LIVES: Final = 5
"""How often a reader looks again when what it saw in a listing is gone by the time it asks."""
_NUM_READS: Final = 32
"""Records read at once."""


async def create_ref(backend: Backend, run: str, step: int, *, manifest: str, transaction: str, now: float) -> Ref:
    """Commit: create the next version of ``run@step`` and return it.

    Of several racing callers each gets a version of its own. Calling again for the same transaction, after an answer
    was lost, returns the ref that is there already.

    Raises:
        ConfigError: a name or a number is out of range.
        ConflictError: all versions of this step are used.
        StorageError: the storage failed, and nothing of this transaction can be read back.
    """
    infos = _RefListing(await _list(backend, step_prefix(run, step))).infos
    for found in await map_bounded(functools.partial(_read_if_whole, backend), infos.values(), _NUM_READS):
        if found is not None and found.transaction == transaction:
            return found
    first = max((key.version for key in infos), default=0) + 1
    for version in range(first, MAX_VERSION + 1):
        ref = Ref(run, step, version, manifest, transaction, now)
        there = await _put_ref(backend, ref)
        if there is not None and there.transaction == transaction:
            return there
    raise ConflictError(f"cannot save {run}@{step} again: all {MAX_VERSION} versions are used", step=step)


async def _read_if_whole(backend: Backend, info: ObjectInfo) -> Ref | None:
    """Return the ref; None if it is damaged, which the next version heals, or was just deleted."""
    try:
        return await _read(backend, info)
    except (FormatError, ObjectNotFoundError):
        return None


async def _put_ref(backend: Backend, ref: Ref) -> Ref | None:
    """Return what is under the ref's key after trying to put it there; None if that is damaged."""
    data = await put_once(backend, ref.key, encode_ref(ref))
    try:
        return decode_ref(data, ref.key)
    except FormatError:
        return None


async def read_ref(backend: Backend, run: str, step: int) -> Ref:
    """Return the highest version of ``run@step``.

    A damaged highest version is an error and not a reason to return an older one.

    Raises:
        RefNotFoundError: the step has no ref.
        CorruptionError: the ref was changed after it was written.
        FormatError, UnsupportedVersionError: it cannot be understood.
        StorageError: the storage failed.
    """
    for _ in range(_LIVES):
        newest = _RefListing(await _list(backend, step_prefix(run, step))).newest()
        if newest is None:
            break
        try:
            return await _read(backend, newest)
        except ObjectNotFoundError:
            continue  # deleted between the two requests
    raise RefNotFoundError(f"cannot read {run}@{step}: {backend.url} has no such snapshot", step=step)


async def read_ref_version(backend: Backend, run: str, step: int, version: int) -> Ref:
    """Return one version of ``run@step``, asked for by its key and not looked up in a listing.

    Raises:
        RefNotFoundError: there is no such version.
        CorruptionError, FormatError, UnsupportedVersionError, StorageError: as for ``read_ref``.
    """
    key = ref_key(run, step, version)
    try:
        return decode_ref(await read_bounded(backend, key, MAX_RECORD_BYTES), key)
    except ObjectNotFoundError as error:
        message = f"cannot read version {version} of {run}@{step}: {backend.url} has no such snapshot"
        raise RefNotFoundError(message, step=step) from error


async def latest_ref(backend: Backend, run: str) -> Ref:
    """Return the ref of the run's highest step, by number.

    Raises:
        RefNotFoundError: the run has no ref.
        CorruptionError, FormatError, UnsupportedVersionError, StorageError: as for ``read_ref``.
    """
    for _ in range(_LIVES):
        newest = _RefListing(await _list(backend, run_prefix(run))).newest()
        if newest is None:
            break
        try:
            return await _read(backend, newest)
        except ObjectNotFoundError:
            continue  # deleted between the two requests
    raise RefNotFoundError(f"cannot read the latest snapshot of run {run!r}: {backend.url} has none of it")


async def list_ref_keys(backend: Backend, run: str, *, strict: bool = False) -> tuple[RefKey, ...]:
    """Return run, step and version of all refs of a run, ascending, with one listing and no other request.

    Raises:
        FormatError: ``strict``, and keys are there that no writer makes; names them. Otherwise they are ignored.
        StorageError: the storage failed.
    """
    return tuple(sorted((await _list_run(backend, run, strict=strict)).infos))


async def list_refs(backend: Backend, run: str, *, strict: bool = False, all_versions: bool = False) -> tuple[Ref, ...]:
    """Return the refs of a run by step: the highest version of each, or all.

    A ref that is deleted meanwhile is left out.

    Raises:
        FormatError: ``strict``, and the run has keys that no writer makes.
        CorruptionError, FormatError, UnsupportedVersionError: a ref cannot be read; none is left out in silence.
        StorageError: the storage failed.
    """
    infos = (await _list_run(backend, run, strict=strict)).infos
    wanted = sorted(infos)
    if not all_versions:
        wanted = sorted({key.step: key for key in wanted}.values())  # ascending, so the highest version stays

    async def read(key: RefKey) -> Ref | None:
        try:
            return await _read(backend, infos[key])
        except ObjectNotFoundError:
            return None

    refs = await map_bounded(read, wanted, _NUM_READS)
    return tuple(ref for ref in refs if ref is not None)


async def list_runs(backend: Backend) -> tuple[str, ...]:
    """Return the names of all runs that have a ref, sorted.

    Raises:
        StorageError: the storage failed.
    """
    return tuple(sorted({key.run for key in _RefListing(await _list(backend, REFS_PREFIX)).infos}))


async def delete_ref(backend: Backend, run: str, step: int) -> None:
    """Delete all versions of ``run@step``, the oldest first, so that no crash makes an older one the highest.

    The data stay until they are collected.

    Raises:
        ConflictError: tags point to the step; names them.
        RefNotFoundError: the step has no ref.
        StorageError: the storage failed.
    """
    tags = [tag.name for tag in await list_tags(backend, run) if tag.ref.step == step]
    if tags:
        raise ConflictError(f"cannot delete {run}@{step}: tags {tags} protect it; delete them first", step=step)
    infos = _RefListing(await _list(backend, step_prefix(run, step))).infos
    if not infos:
        raise RefNotFoundError(f"cannot delete {run}@{step}: {backend.url} has no such snapshot", step=step)
    for key in sorted(infos):
        await backend.delete(ref_key(*key))


async def resolve(backend: Backend, name: str | SnapshotName) -> Ref:
    """Return the ref that ``run``, ``run@step`` or ``run@tag`` means; without a step or tag, the latest.

    Raises:
        ConfigError: it is no such name.
        RefNotFoundError: there is no such snapshot.
        CorruptionError, FormatError, UnsupportedVersionError, StorageError: as for ``read_ref``.
    """
    wanted = parse_name(name) if isinstance(name, str) else name
    if wanted.tag is not None:
        return (await read_tag(backend, wanted.run, wanted.tag)).ref
    if wanted.step is not None:
        return await read_ref(backend, wanted.run, wanted.step)
    return await latest_ref(backend, wanted.run)


# ---- tags


async def set_tag(backend: Backend, run: str, tag: str, step: int, *, now: float) -> Tag:
    """Name the highest version of ``run@step`` and return the tag; the same again changes nothing.

    Raises:
        ConflictError: the tag exists and points elsewhere: tags never move.
        RefNotFoundError: the step has no ref, or lost it meanwhile.
        ConfigError, CorruptionError, FormatError, StorageError: as for ``read_ref``.
    """
    key = tag_key(run, tag)
    ref = await read_ref(backend, run, step)
    data = encode_tag(Tag(tag, ref, now))
    there = await put_once(backend, key, data)
    made = decode_tag(there, key)
    if made.ref != ref:
        raise ConflictError(
            f"cannot set {run}@{tag} to step {step} version {ref.version}: it is on step {made.ref.step} version "
            f"{made.ref.version} and tags do not move; delete it first"
        )
    try:
        # Whoever deletes the step looks for tags first. Had it looked before this tag was there, the ref is gone by
        # now, or is about to go, and then the tag still says all that the ref did.
        await read_ref_version(backend, run, step, ref.version)
    except RefNotFoundError:
        if there == data:
            await backend.delete(key)
        raise
    return made


async def read_tag(backend: Backend, run: str, tag: str) -> Tag:
    """Return a tag.

    Raises:
        RefNotFoundError: there is none of this name.
        CorruptionError, FormatError, UnsupportedVersionError, StorageError: as for ``read_ref``.
    """
    key = tag_key(run, tag)
    try:
        return decode_tag(await read_bounded(backend, key, MAX_RECORD_BYTES), key)
    except ObjectNotFoundError as error:
        raise RefNotFoundError(f"cannot read {run}@{tag}: {backend.url} has no such tag") from error


async def list_tags(backend: Backend, run: str) -> tuple[Tag, ...]:
    """Return the tags of a run by name; keys that do not parse are ignored.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError, StorageError: as for ``read_ref``.
    """

    async def read(info: ObjectInfo) -> Tag | None:
        try:
            return await read_listed(backend, info, decode_tag)
        except ObjectNotFoundError:
            return None

    infos = [info for info in await _list(backend, tags_prefix(run)) if _is_tag(info.key)]
    tags = await map_bounded(read, infos, _NUM_READS)
    return tuple(sorted((tag for tag in tags if tag is not None), key=lambda tag: tag.name))


async def delete_tag(backend: Backend, run: str, tag: str) -> None:
    """Delete a tag, readable or not; its step can be deleted afterwards.

    Raises:
        RefNotFoundError: there is none of this name.
        StorageError: the storage failed.
    """
    key = tag_key(run, tag)
    try:
        await backend.head(key)
    except ObjectNotFoundError as error:
        raise RefNotFoundError(f"cannot delete {run}@{tag}: {backend.url} has no such tag") from error
    await backend.delete(key)


# ---- listings


class _RefListing:
    """The refs among listed objects, and the keys that are neither refs nor tags."""

    def __init__(self, infos: Iterable[ObjectInfo]) -> None:
        self.infos: dict[RefKey, ObjectInfo] = {}
        self.strange: list[str] = []
        for info in infos:
            try:
                self.infos[parse_ref_key(info.key)] = info
            except FormatError:
                if not _is_tag(info.key):
                    self.strange.append(info.key)

    def newest(self) -> ObjectInfo | None:
        """Return the highest version of the highest step."""
        return self.infos[max(self.infos)] if self.infos else None


def _is_tag(key: str) -> bool:
    try:
        parse_tag_key(key)
    except FormatError:
        return False
    return True


async def _list(backend: Backend, prefix: str) -> list[ObjectInfo]:
    return [info async for info in backend.list(prefix)]


async def _list_run(backend: Backend, run: str, *, strict: bool) -> _RefListing:
    listing = _RefListing(await _list(backend, run_prefix(run)))
    if strict and listing.strange:
        raise FormatError(
            f"run {run!r} in {backend.url} has {len(listing.strange)} keys that are neither refs nor tags: "
            f"{', '.join(map(ascii, listing.strange[:20]))}; find out what put them there and remove them",
            keys=tuple(listing.strange),
        )
    return listing


async def _read(backend: Backend, info: ObjectInfo) -> Ref:
    return await read_listed(backend, info, decode_ref)
