"""A transaction: how the ranks of one save agree on its outcome through storage alone.

No collective runs in the background of a training job. Each rank puts one fragment; the coordinator collects them and
either puts the ref or an abort record; everybody else looks for one of the two. Every wait has a deadline, and its
error names the phase and the ranks.

Who decides: only the coordinator, and it does exactly one of the two things. Another rank's abort record is a request.
It is final by itself only where that rank has no fragment: the coordinator cannot go on without it, and would find a
fragment that arrives later together with the record. After its fragment a rank's abort may come too late, so the
coordinator's word is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Final

from vescale_storage.deadline import MAX_PAUSE_SECONDS, Deadline
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    FormatError,
    NotFoundError,
    ObjectNotFoundError,
    RankFailureError,
    StateError,
    StorageError,
    VeScaleError,
)
from vescale_storage.failures import aborted, silent
from vescale_storage.fragment import AbortRecord, encode_abort, encode_fragment
from vescale_storage.keys import (
    MAX_RANK,
    MAX_VERSION,
    abort_key,
    abort_prefix,
    fragment_key,
    parse_ref_key,
    parse_transaction_key,
    step_prefix,
    transaction_prefix,
)
from vescale_storage.parallel import map_bounded
from vescale_storage.refs import Ref, read_ref_version
from vescale_storage.sealed import put_once
from vescale_storage.transaction_objects import (
    TransactionInfo,
    TransactionObjects,
    clean_transaction,
    find_transactions,
    new_transaction_id,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from vescale_storage.backend import Backend, Buffer

__all__ = [
    "Transaction",
    "TransactionInfo",
    "clean_transaction",
    "find_transactions",
    "new_transaction_id",
]

_LAST_LOOK_SECONDS: Final = 5.0
"""Beyond a deadline, for asking by key what listings did not show, and for writing down the outcome."""
_NUM_REQUESTS: Final = 64
_NUM_RECORDS: Final = 64
"""Abort records that one error tells of."""
_NUM_LATE_VERSIONS: Final = 8
"""Versions past the highest listed one that are asked for by key."""


class Transaction:
    """One attempt to save, as one of its ranks sees it. Used on one event loop."""

    def __init__(
        self,
        backend: Backend,
        id_hex: str,
        world_size: int,
        *,
        coordinator: int = 0,
        max_pause_seconds: float = MAX_PAUSE_SECONDS,
    ) -> None:
        transaction_prefix(id_hex)
        if not 1 <= world_size <= MAX_RANK + 1:
            raise ConfigError(f"cannot begin a transaction of {world_size} ranks: expected 1 to {MAX_RANK + 1}")
        self.id = id_hex
        self.world_size = world_size
        self.coordinator = coordinator
        self._backend = backend
        self._objects = TransactionObjects(backend, id_hex, world_size)
        self._max_pause_seconds = max_pause_seconds
        """Raise it where thousands of ranks poll one object store."""
        self._aborted: set[int] = set()
        self._check_rank(coordinator)

    # ---- every rank

    async def write_fragment(self, rank: int, content: Buffer) -> None:
        """Put this rank's fragment; the same content again, after an answer was lost, is no error.

        Raises:
            ConflictError: the rank has put other content before.
            StateError: the rank has aborted.
            StorageError: the storage failed, and the fragment is not there.
        """
        self._check_rank(rank)
        if rank in self._aborted:
            raise StateError(
                f"cannot write the fragment of rank {rank}: it has aborted transaction {self.id}", rank=rank
            )
        payload = encode_fragment(self.id, rank, content)
        key = fragment_key(self.id, rank)
        size, check = sum(len(part) for part in payload), bytes(payload[-1])
        try:
            await self._backend.put_if_absent(key, payload)
        except AlreadyExistsError as error:
            if not await self._objects.holds(key, size, check):
                message = f"cannot write {key!r}: rank {rank} has put other content before; is one rank running twice?"
                raise ConflictError(message, rank=rank, key=key) from error
        except StorageError:
            if not await self._objects.holds(key, size, check):
                raise

    async def abort(
        self, rank: int, message: str, kind: str = VeScaleError.kind, *, failures: dict[int, str] | None = None
    ) -> None:
        """Put this rank's abort record; its first one stands. The rank must not write its fragment after that.

        The coordinator calls this only if it has not put the ref and never will; ``failures`` tells which other ranks
        made the save fail.

        Raises:
            StorageError: the storage failed.
        """
        self._check_rank(rank)
        self._aborted.add(rank)
        record = AbortRecord(self.id, rank, kind, message, failures or {})
        await put_once(self._backend, abort_key(self.id, rank), encode_abort(record))

    async def await_commit(self, run: str, step: int, deadline_seconds: float, phase: str = "await the commit") -> Ref:
        """Wait until this transaction's ref is there, and return it.

        ``deadline_seconds`` counts from now, and some seconds are added: the coordinator, whose wait may have begun at
        the same moment, needs them to write down which ranks it found missing. A ref that is there counts, whatever
        abort records say.

        Raises:
            RankFailureError: the transaction was aborted, or the coordinator left nothing by the deadline.
            StorageError: the storage failed for good.
        """
        deadline = Deadline(deadline_seconds + _LAST_LOOK_SECONDS, max_pause_seconds=self._max_pause_seconds)
        seen: set[int] = set()
        while True:
            # In this order: a fragment that is missing because a committed transaction was cleaned implies a ref that
            # the later listing shows.
            aborts = await deadline.attempt(self._final_aborts)
            refs = await deadline.attempt(functools.partial(self._listed_refs, run, step, seen))
            if refs:
                return refs[0]
            if aborts and refs is not None:
                raise await self._failure(aborts, phase)
            if not await deadline.pause():
                break
        return await self._last_look_for_commit(run, step, max(seen, default=0), deadline, phase)

    # ---- the coordinator

    async def collect(self, deadline_seconds: float, phase: str = "collect the fragments") -> list[bytes]:
        """Wait for the fragments of all ranks, and return their contents by rank.

        ``deadline_seconds`` counts from now. Before this raises, it puts the coordinator's abort record, so that all
        ranks learn the outcome.

        Raises:
            RankFailureError: a rank has aborted, or has not reported by the deadline; names the ranks.
            CorruptionError: a fragment was changed after it was written.
            FormatError, UnsupportedVersionError: a fragment cannot be understood.
            StorageError: the storage failed for good.
        """
        deadline = Deadline(deadline_seconds, max_pause_seconds=self._max_pause_seconds)
        try:
            contents = await self._collect(deadline, phase)
        except VeScaleError as error:
            failures = error.failures if isinstance(error, RankFailureError) else {}
            with contextlib.suppress(VeScaleError, TimeoutError):  # the error at hand is the one to raise
                async with asyncio.timeout(_LAST_LOOK_SECONDS):
                    await self.abort(self.coordinator, error.message, error.kind, failures=failures)
            raise
        return [contents[rank] for rank in range(self.world_size)]

    async def clean(self) -> None:
        """Delete all that the transaction has put; for the coordinator, once the ref is there.

        An aborted transaction is left for the collection of garbage: ranks may still be looking for its records.

        Raises:
            StorageError: the storage failed.
        """
        await clean_transaction(self._backend, self.id)

    async def _collect(self, deadline: Deadline, phase: str) -> dict[int, bytes]:
        contents: dict[int, bytes] = {}
        while True:
            present = await deadline.attempt(self._objects.list)
            if present is not None:
                if present.aborts:
                    raise await self._failure(present.aborts, phase)
                if len(contents) == self.world_size:
                    return contents  # listed after the last fragment was read: no rank aborted before its fragment
                new = {rank: size for rank, size in present.fragments.items() if rank not in contents}
                await deadline.attempt(functools.partial(self._fetch, new, contents))
                if len(contents) == self.world_size:
                    continue
            if not await deadline.pause():
                break
        return await self._last_look_for_fragments(contents, deadline, phase)

    # ---- last looks, past the deadline: by key, as no listing alone may decide

    async def _last_look_for_fragments(
        self, contents: dict[int, bytes], deadline: Deadline, phase: str
    ) -> dict[int, bytes]:
        aborts: set[int] = set()
        unknown = set(range(self.world_size))

        async def look(rank: int) -> None:
            # The abort record after the fragment: one that is older than the fragment is final to others, see above.
            if rank not in contents:
                with contextlib.suppress(ObjectNotFoundError):
                    contents[rank] = await self._objects.read_fragment(rank)
            if await self._objects.exists(abort_key(self.id, rank)):
                aborts.add(rank)
            unknown.discard(rank)

        async def patiently(rank: int) -> None:
            await last.attempt(functools.partial(look, rank))

        last = Deadline(_LAST_LOOK_SECONDS)
        await map_bounded(patiently, range(self.world_size), _NUM_REQUESTS)
        if aborts:
            raise await self._failure(aborts, phase)
        missing = unknown | (set(range(self.world_size)) - contents.keys())
        if missing:
            raise self._silence(missing, "fragment or abort record", deadline, last, phase)
        return contents

    async def _last_look_for_commit(self, run: str, step: int, newest: int, deadline: Deadline, phase: str) -> Ref:
        async def look() -> Ref | None:
            aborts = await self._objects.exists(abort_key(self.id, self.coordinator))
            for version in range(newest + 1, min(newest + _NUM_LATE_VERSIONS, MAX_VERSION) + 1):
                ref = await self._read_ref(run, step, version)
                if ref is not None:
                    return ref
            if aborts:
                raise await self._failure({self.coordinator}, phase)
            return None

        last = Deadline(_LAST_LOOK_SECONDS)
        ref = await last.attempt(look)
        if ref is None:
            idle = await self._without_fragment(last)
            raise self._silence({self.coordinator}, "ref or abort record", deadline, last, phase, without_fragment=idle)
        return ref

    # ---- errors

    async def _failure(self, aborts: Collection[int], phase: str) -> RankFailureError:
        """Return the error that tells of these ranks' abort records."""
        last = Deadline(_LAST_LOOK_SECONDS)
        records: dict[int, AbortRecord | None] = {}

        async def read(rank: int) -> None:
            with contextlib.suppress(FormatError, NotFoundError, StorageError):
                records[rank] = await last.attempt(functools.partial(self._objects.read_abort, rank))

        told = sorted(aborts, key=lambda rank: (rank != self.coordinator, rank))[:_NUM_RECORDS]
        records |= dict.fromkeys(told)
        await map_bounded(read, told, _NUM_REQUESTS)
        return aborted(self.id, phase, self.coordinator, records)

    def _silence(
        self,
        ranks: Collection[int],
        missing: str,
        deadline: Deadline,
        last: Deadline,
        phase: str,
        *,
        without_fragment: Collection[int] = (),
    ) -> RankFailureError:
        cause = last.last_error or deadline.last_error
        error = silent(
            self.id,
            phase,
            ranks,
            self.world_size,
            seconds=deadline.seconds,
            missing=missing,
            without_fragment=without_fragment,
            cause=cause,
        )
        error.__cause__ = cause
        return error

    async def _without_fragment(self, last: Deadline) -> set[int]:
        """Return the ranks whose fragments are not listed: a hint at whom the coordinator was waiting for."""
        present = None
        with contextlib.suppress(VeScaleError):  # it is only to make an error more helpful
            present = await last.attempt(self._objects.list)
        return set() if present is None else set(range(self.world_size)) - present.fragments.keys()

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"cannot use rank {rank} in a transaction of {self.world_size} ranks", rank=rank)

    # ---- looking

    async def _fetch(self, sizes: dict[int, int], contents: dict[int, bytes]) -> None:
        async def fetch(rank: int) -> None:
            contents[rank] = await self._objects.read_fragment(rank, sizes[rank])

        await map_bounded(fetch, sizes, _NUM_REQUESTS)

    async def _final_aborts(self) -> set[int]:
        """Return the ranks that aborted, or nobody while the coordinator may still commit in spite of them."""
        aborts: set[int] = set()
        async for info in self._backend.list(abort_prefix(self.id)):
            with contextlib.suppress(FormatError):
                aborts.add(parse_transaction_key(info.key).rank)
        if self.coordinator in aborts:
            return aborts
        for rank in sorted(aborts)[:_NUM_RECORDS]:
            if not await self._objects.exists(fragment_key(self.id, rank)):
                return aborts
        return set()

    async def _listed_refs(self, run: str, step: int, seen: set[int]) -> list[Ref]:
        """Return this transaction's ref, if it is listed; ``seen`` grows by the versions known not to be it."""
        versions = []
        async for info in self._backend.list(step_prefix(run, step)):
            with contextlib.suppress(FormatError):
                versions.append(parse_ref_key(info.key).version)
        for version in sorted(set(versions) - seen, reverse=True):
            ref = await self._read_ref(run, step, version)
            if ref is not None:
                return [ref]
            seen.add(version)
        return []

    async def _read_ref(self, run: str, step: int, version: int) -> Ref | None:
        with contextlib.suppress(FormatError, NotFoundError):
            ref = await read_ref_version(self._backend, run, step, version)
            return ref if ref.transaction == self.id else None
        return None
