"""What lies under ``txn/<id>/``: each object of a transaction asked for, listed or deleted, without any waiting."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vescale_storage.digest import DIGEST_BYTES
from vescale_storage.errors import ConflictError, FormatError, ObjectNotFoundError, VeScaleError
from vescale_storage.fragment import MAX_FRAGMENT_BYTES, AbortRecord, decode_abort, decode_fragment
from vescale_storage.keys import (
    TRANSACTION_DIGITS,
    TRANSACTIONS_PREFIX,
    abort_key,
    abort_prefix,
    fragment_key,
    parse_transaction_key,
    transaction_prefix,
)
from vescale_storage.parallel import map_bounded
from vescale_storage.sealed import MAX_RECORD_BYTES, read_bounded

if TYPE_CHECKING:
    from vescale_storage.backend import Backend

_NUM_DELETES: Final = 64


@dataclass(frozen=True, slots=True)
class TransactionInfo:
    """What a listing tells of a transaction that left objects behind."""

    id: str
    num_fragments: int
    num_aborts: int
    size_bytes: int
    modified_seconds: float
    """The newest object's time, by the back end's clock."""


@dataclass(slots=True)
class Present:
    """Ranks whose objects a listing showed, with their sizes."""

    fragments: dict[int, int] = field(default_factory=dict)
    aborts: dict[int, int] = field(default_factory=dict)


class TransactionObjects:
    """The objects of one transaction."""

    def __init__(self, backend: Backend, id_hex: str, world_size: int) -> None:
        self.backend = backend
        self.id = id_hex
        self.world_size = world_size

    async def list(self) -> Present:
        """Return which ranks' fragments and abort records a listing shows.

        Raises:
            ConflictError: a rank that the transaction does not have has put something.
            StorageError: the storage failed.
        """
        present = Present()
        async for info in self.backend.list(transaction_prefix(self.id)):
            with contextlib.suppress(FormatError):
                found = parse_transaction_key(info.key)
                if found.rank >= self.world_size:
                    raise ConflictError(
                        f"transaction {self.id} has {self.world_size} ranks, but {info.key!r} is there: two jobs use "
                        "one id",
                        key=info.key,
                    )
                (present.aborts if found.is_abort else present.fragments)[found.rank] = info.size_bytes
        return present

    async def read_fragment(self, rank: int, size_bytes: int | None = None) -> bytes:
        """Return the content of a rank's fragment; its size may be known from a listing.

        Raises:
            ObjectNotFoundError: there is none.
            CorruptionError, UnsupportedVersionError: as for ``decode_fragment``.
            StorageError: the storage failed.
        """
        data = await read_bounded(self.backend, fragment_key(self.id, rank), MAX_FRAGMENT_BYTES, size_bytes)
        return bytes(decode_fragment(data, self.id, rank))

    async def read_abort(self, rank: int) -> AbortRecord:
        """Return a rank's abort record.

        Raises:
            ObjectNotFoundError: there is none.
            CorruptionError, FormatError, UnsupportedVersionError: it cannot be read.
            StorageError: the storage failed.
        """
        data = await read_bounded(self.backend, abort_key(self.id, rank), MAX_RECORD_BYTES)
        return decode_abort(data, self.id, rank)

    async def exists(self, key: str) -> bool:
        """Return whether the key holds an object, asked by key.

        Raises:
            StorageError: the storage failed.
        """
        try:
            await self.backend.head(key)
        except ObjectNotFoundError:
            return False
        return True

    async def holds(self, key: str, size_bytes: int, check: bytes) -> bool:
        """Return whether the fragment under ``key`` has this size and check; False as well if nobody can tell."""
        found = bytearray(DIGEST_BYTES)
        try:
            if (await self.backend.head(key)).size_bytes != size_bytes:
                return False
            await self.backend.get_into(key, size_bytes - DIGEST_BYTES, memoryview(found))
        except VeScaleError:
            return False
        return found == check


def new_transaction_id() -> str:
    """Return a fresh random id of 32 hex digits; one rank draws it and tells the others."""
    return os.urandom(TRANSACTION_DIGITS // 2).hex()


async def find_transactions(backend: Backend) -> tuple[TransactionInfo, ...]:
    """Return the transactions that have objects, by id: those under way and those that died or were aborted.

    Raises:
        StorageError: the storage failed.
    """
    found: dict[str, TransactionInfo] = {}
    async for info in backend.list(TRANSACTIONS_PREFIX):
        with contextlib.suppress(FormatError):
            key = parse_transaction_key(info.key)
            so_far = found.get(key.transaction, TransactionInfo(key.transaction, 0, 0, 0, 0.0))
            found[key.transaction] = TransactionInfo(
                key.transaction,
                so_far.num_fragments + (not key.is_abort),
                so_far.num_aborts + key.is_abort,
                so_far.size_bytes + info.size_bytes,
                max(so_far.modified_seconds, info.modified_seconds),
            )
    return tuple(found[transaction] for transaction in sorted(found))


async def clean_transaction(backend: Backend, id_hex: str) -> None:
    """Delete all that a transaction has put, its abort records last.

    Raises:
        StorageError: the storage failed.
    """
    keys = [info.key async for info in backend.list(transaction_prefix(id_hex))]
    last = [key for key in keys if key.startswith(abort_prefix(id_hex))]
    await map_bounded(backend.delete, set(keys).difference(last), _NUM_DELETES)
    await map_bounded(backend.delete, last, _NUM_DELETES)
