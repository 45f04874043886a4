"""Repacking: live chunks of packs that are mostly dead are copied to new packs, and snapshots follow them.

Like a save it writes packs, then manifests, then refs, refers to nothing that is marked, and deletes an old ref only
after the new one is there. So whenever it dies every snapshot is whole; what it leaves the next call takes up or
collects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.collecting.repack_plan import Liveness, Place, RepackPlan, moved, plan_repack, stored_rows
from vescale_ckpt.errors import (
    ConflictError,
    CorruptionError,
    FormatError,
    InternalError,
    ObjectNotFoundError,
    VeScaleError,
)
from vescale_ckpt.execute.hints import put_hints
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest, store_manifest
from vescale_ckpt.execute.write import renamed
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import FORMAT_VERSION
from vescale_ckpt.state.dtypes import item_bytes
from vescale_storage import loop
from vescale_storage.collect.marks import refused
from vescale_storage.collect.plan import Tally
from vescale_storage.collect.versions import create_next_version, delete_versions
from vescale_storage.digest import digest
from vescale_storage.keys import (
    PACKS_PREFIX,
    TRANSACTION_DIGITS,
    pack_key,
    parse_pack_key,
    parse_ref_key,
    step_prefix,
)
from vescale_storage.pack import Codec, PackBuilder, decode_chunk, put_pack
from vescale_storage.ranges import coalesce

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    import numpy.typing as npt

    from vescale_ckpt.format.records import Manifest
    from vescale_storage.backend import Backend, ObjectInfo
    from vescale_storage.collect.gc_objects import MarkReader
    from vescale_storage.collect.marks import Marked
    from vescale_storage.collect.roots import RootReader, Roots
    from vescale_storage.refs import Ref

_log = logging.getLogger(__name__)

_PACK_BYTES = 64 << 20
_SPAN_BYTES = 16 << 20
_GAP_BYTES = 256 << 10
_TIME_PART = 0.25
"""It begins no further snapshot after this part of the grace period."""


@dataclass(slots=True)
class Repacked:
    """What repacking found and did."""

    plan: RepackPlan
    copied: Tally = field(default_factory=Tally)
    """Chunks, and their stored bytes."""
    written: Tally = field(default_factory=Tally)
    """New packs."""
    snapshots: tuple[str, ...] = ()
    """That have a new version now."""
    skipped: tuple[str, ...] = ()
    """That stay as they were, and why."""
    damaged: tuple[str, ...] = ()
    """Packs of which chunks are not what they should be; nothing was copied from there."""
    dry_run: bool = False


class Repacker:
    """Rewrites packs of one store."""

    def __init__(
        self,
        backend: Backend,
        roots: RootReader,
        marks: MarkReader,
        *,
        grace_seconds: float,
        now: float,
        progress: Callable[[str, int], None],
    ) -> None:
        self._backend = backend
        self._roots = roots
        self._marks = marks
        self._grace_seconds = grace_seconds
        self._now = now
        self._progress = progress
        self._began = time.monotonic()
        self._places: dict[bytes, Place] = {}
        self._sizes: dict[str, int] = {}

    def repack(self, *, dry_run: bool) -> Repacked:
        """Plan, and unless ``dry_run`` do it.

        Raises:
            FormatError: a root cannot be read; nothing was changed.
            StorageError: the storage failed; every snapshot is whole.
        """
        # As for a save: marks first, then what is referred to.
        marked = loop.run(self._marks.marked())
        roots = loop.run(self._roots.read(self._progress))
        result = Repacked(self._plan(roots), dry_run=dry_run)
        if dry_run:
            return result
        for ref in result.plan.replaced:
            loop.run(delete_versions(self._backend, ref.run, ref.step, [ref.version]))
        self._copy(result, marked)
        old_packs = {pack.name for pack in result.plan.packs}
        done, skipped = [], []
        for ref in result.plan.refs:
            try:
                if self._is_late():
                    skipped.append(f"{ref.run}@{ref.step}: its turn comes with a later collection")
                elif self._rewrite(ref, old_packs):
                    done.append(f"{ref.run}@{ref.step}")
            except ConflictError as error:
                skipped.append(f"{ref.run}@{ref.step}: {error}")
            self._progress("snapshots rewritten", len(done))
        result.snapshots, result.skipped = tuple(done), tuple(skipped)
        return result

    # ---- looking

    def _plan(self, roots: Roots) -> RepackPlan:
        liveness, foreign = Liveness(), []
        by_manifest = {ref.manifest: ref for ref in (*(tag.ref for tag in roots.tags), *roots.refs)}
        for number, (name, ref) in enumerate(by_manifest.items(), 1):
            manifest = self._open(ref)
            liveness.add(manifest)
            if manifest.version > FORMAT_VERSION:
                foreign.append(name)
            self._progress("manifests measured", number)
        return plan_repack(
            roots,
            loop.run(self._packs()),
            liveness.live_bytes(),
            foreign=foreign,
            old_seconds=self._now - self._grace_seconds,
            rewritten={name: rewriting_of(name) for name in by_manifest},
        )

    async def _packs(self) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        async for info in self._backend.list(PACKS_PREFIX):
            with contextlib.suppress(FormatError):
                found[parse_pack_key(info.key)] = info
        return found

    def _open(self, ref: Ref) -> Manifest:
        return open_manifest(fetch_manifest(self._backend, ref), ref)

    # ---- copying

    def _copy(self, result: Repacked, marked: Marked) -> None:
        """Copy the live chunks of the chosen packs, each once, and note where they are now."""
        chosen = {pack.name for pack in result.plan.packs}
        builder = PackBuilder()
        damaged: set[str] = set()
        for ref in result.plan.refs:
            manifest = self._open(ref)
            raw_bytes = _raw_bytes(manifest)
            for row, stored in self._stored(manifest, chosen, damaged):
                name, codec = manifest.chunks.digest[row].tobytes(), Codec(int(manifest.chunks.codec[row]))
                if not _is_right(stored, codec, int(raw_bytes[row]), name):
                    damaged.add(manifest.packs[int(manifest.chunks.pack[row])].name)
                    continue
                builder.add(name, [stored], codec)
                self._places[name] = Place("", 0, 0, 0)  # taken; known when the pack is put
                result.copied += Tally(1, len(stored))
                if builder.size_bytes >= _PACK_BYTES:
                    self._put(builder, marked, result)
                    builder = PackBuilder()
        if len(builder):
            self._put(builder, marked, result)
        result.damaged = tuple(sorted(damaged))
        for pack in result.damaged:
            _log.warning("repacking: %s is damaged, what refers to it was left as it is", pack_key(pack))

    def _stored(self, manifest: Manifest, packs: Collection[str], damaged: set[str]) -> Iterator[tuple[int, bytes]]:
        """Yield (row, stored bytes) of the chunks in some packs that have not been copied yet; each digest once."""
        chunks = manifest.chunks
        rows: dict[int, list[int]] = {}
        taken: set[bytes] = set()
        for row in stored_rows(manifest, packs):
            name = chunks.digest[row].tobytes()
            if name not in self._places and name not in taken:
                taken.add(name)
                rows.setdefault(int(chunks.pack[row]), []).append(row)
        for pack, members in rows.items():
            ranges = [(int(chunks.offset[row]), int(chunks.length[row])) for row in members]
            for span in coalesce(ranges, _GAP_BYTES, _SPAN_BYTES):
                if self._is_late():
                    return
                data = bytearray(span.length)
                try:
                    loop.run(self._backend.get_into(pack_key(manifest.packs[pack].name), span.start, memoryview(data)))
                except (CorruptionError, ObjectNotFoundError):
                    damaged.add(manifest.packs[pack].name)
                    break
                for i in span.members:
                    start = ranges[i][0] - span.start
                    yield members[i], bytes(data[start : start + ranges[i][1]])

    def _put(self, builder: PackBuilder, marked: Marked, result: Repacked) -> None:
        pack = builder.finish()
        if pack.name_hex in marked:
            pack = renamed(builder)
        loop.run(put_pack(self._backend, pack))
        for entry in pack.entries:
            self._places[entry.digest] = Place(pack.name_hex, entry.offset, entry.length, int(entry.codec))
        self._sizes[pack.name_hex] = pack.size_bytes
        result.written += Tally(1, pack.size_bytes)
        self._progress("packs written", result.written.num)

    # ---- rewriting

    def _rewrite(self, ref: Ref, old_packs: Collection[str]) -> bool:
        """Give a snapshot a version that finds its chunks in the new packs, then delete the old version.

        Raises:
            ConflictError: the snapshot was saved again or deleted meanwhile, or this took too long; it stays as it is.
        """
        old = self._open(ref)
        new = moved(old, self._places, self._sizes, old_packs)
        if new is None:
            return False
        # A name of its own: under one that was there before, a deletion may be on its way.
        new = dataclasses.replace(new, transaction=os.urandom(TRANSACTION_DIGITS // 2).hex())
        _prove_same(old, decode_manifest(encode_manifest(new)))
        manifest = store_manifest(self._backend, new)
        self._refuse_if_marked(new)
        if loop.run(self._newest_version(ref)) != ref.version:
            raise ConflictError("it was saved again or deleted meanwhile")
        loop.run(
            create_next_version(
                self._backend,
                ref,
                manifest=manifest,
                transaction=rewriting_of(ref.manifest),
                now=ref.created_seconds,
            )
        )
        with contextlib.suppress(VeScaleError):  # a hint that is missing costs bytes and nothing else
            put_hints(self._backend, new, manifest)
        loop.run(delete_versions(self._backend, ref.run, ref.step, [ref.version]))
        return True

    async def _newest_version(self, ref: Ref) -> int:
        versions = [0]
        async for info in self._backend.list(step_prefix(ref.run, ref.step)):
            with contextlib.suppress(FormatError):
                versions.append(parse_ref_key(info.key).version)
        return max(versions)

    def _refuse_if_marked(self, manifest: Manifest) -> None:
        marks, _ = loop.run(self._marks.marks())
        if refused(marks, (pack.name for pack in manifest.packs), time.monotonic() - self._began):
            raise ConflictError("another collection has marked its packs meanwhile")

    def _is_late(self) -> bool:
        return self._grace_seconds > 0 and time.monotonic() - self._began > _TIME_PART * self._grace_seconds


def rewriting_of(manifest: str) -> str:
    """Return the transaction of the ref that replaces refs to a manifest.

    It follows from the manifest, so that a later call sees what an earlier one was about to do.
    """
    return digest(f"repack {manifest}".encode()).hex()[:TRANSACTION_DIGITS]


def _raw_bytes(manifest: Manifest) -> npt.NDArray[np.int64]:
    """Return how many bytes each chunk has once decoded, ``int64[num_chunks]``."""
    sizes = [
        manifest.chunks.raw_bytes(record, manifest.chunks.rows(i), item_bytes(record.dtype))
        for i, record in enumerate(manifest.tensors)
    ]
    return np.concatenate(sizes) if sizes else np.zeros(0, np.int64)


def _is_right(stored: bytes, codec: Codec, raw_bytes: int, name: bytes) -> bool:
    """Return whether stored bytes are the chunk with this digest."""
    try:
        return digest(decode_chunk(stored, codec, raw_bytes)) == name
    except CorruptionError:
        return False


def _prove_same(old: Manifest, new: Manifest) -> None:
    """Check that a manifest says the same as another, but for where chunks are stored.

    Raises:
        InternalError: it does not.
    """
    same = old.tree == new.tree and old.tensors == new.tensors and old.metadata == new.metadata
    for column in ("first", "tile", "digest", "partial_row", "partial_box"):
        same = same and np.array_equal(getattr(old.chunks, column), getattr(new.chunks, column))
    if not same:
        raise InternalError(f"repacking changed the content of {old.run}@{old.step}; nothing was deleted")
