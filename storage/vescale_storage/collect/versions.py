"""Versions: what a run's refs are by one listing, and versions of a step replaced or deleted one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vescale_storage.errors import ConflictError, FormatError, ObjectNotFoundError
from vescale_storage.keys import parse_ref_key, parse_tag_key, ref_key, run_prefix
from vescale_storage.parallel import map_bounded
from vescale_storage.ref_records import Ref, Tag, decode_ref, encode_ref
from vescale_storage.refs import list_tags
from vescale_storage.sealed import put_once, read_listed

if TYPE_CHECKING:
    from collections.abc import Collection

    from vescale_storage.backend import Backend, ObjectInfo
    from vescale_storage.keys import RefKey

_NUM_READS: Final = 32


@dataclass(frozen=True, slots=True)
class RunListing:
    """The refs of a run, without having read them, and its tags."""

    committed_seconds: dict[int, dict[int, float]]
    """Step -> version -> when it was committed."""
    tags: tuple[Tag, ...]

    def tags_of(self, step: int) -> tuple[str, ...]:
        """Return the names of a step's tags, sorted."""
        return tuple(sorted(tag.name for tag in self.tags if tag.ref.step == step))


async def list_run(backend: Backend, run: str, known: dict[str, float] | None = None) -> RunListing:
    """Return the refs and tags of a run.

    Args:
        backend: where the store is.
        run: which run.
        known: key of a ref -> when it was committed, of refs that were read before; they never change, so they are not
            read again. Those that are read now are added.

    Raises:
        CorruptionError, FormatError, UnsupportedVersionError: a tag cannot be read, so nobody can tell what it holds.
        StorageError: the storage failed.
    """
    known = {} if known is None else known
    infos: dict[RefKey, ObjectInfo] = {}
    any_tag = False
    async for info in backend.list(run_prefix(run)):
        try:
            infos[parse_ref_key(info.key)] = info
        except FormatError:
            any_tag = any_tag or _is_tag(info.key)

    async def read(info: ObjectInfo) -> None:
        try:
            known[info.key] = (await read_listed(backend, info, decode_ref)).created_seconds
        except FormatError:
            known[info.key] = info.modified_seconds  # what it says is lost; that it is there is not
        except ObjectNotFoundError:
            pass  # deleted meanwhile

    await map_bounded(read, [info for info in infos.values() if info.key not in known], _NUM_READS)
    found: dict[int, dict[int, float]] = {}
    for key, info in infos.items():
        if info.key in known:
            found.setdefault(key.step, {})[key.version] = known[info.key]
    # A tag that is set after this holds its snapshot by itself, whatever becomes of the ref.
    return RunListing(found, await list_tags(backend, run) if any_tag else ())


async def delete_versions(backend: Backend, run: str, step: int, versions: Collection[int]) -> bool:
    """Delete these versions of a step, the lowest first, and return True; False, and nothing, if the step is tagged.

    Raises:
        StorageError: the storage failed.
    """
    if any(tag.ref.step == step for tag in await list_tags(backend, run)):
        return False
    for version in sorted(versions):
        await backend.delete(ref_key(run, step, version))
    return True


async def create_next_version(backend: Backend, old: Ref, *, manifest: str, transaction: str, now: float) -> Ref:
    """Create the version right after ``old``, of the same step, and return it.

    Unlike ``refs.create_ref`` it never takes a higher one: if somebody has saved the step meanwhile, what they saved is
    the newest and stays so.

    Raises:
        ConflictError: somebody else has that version.
        StorageError: the storage failed, and the ref is not there.
    """
    ref = Ref(old.run, old.step, old.version + 1, manifest, transaction, now)
    there = decode_ref(await put_once(backend, ref.key, encode_ref(ref)), ref.key)
    if there.transaction != transaction:
        raise ConflictError(
            f"cannot replace version {old.version} of {old.run}@{old.step}: version {ref.version} is there already",
            step=old.step,
        )
    return there


def _is_tag(key: str) -> bool:
    try:
        parse_tag_key(key)
    except FormatError:
        return False
    return True
