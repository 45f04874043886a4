from __future__ import annotations

import uuid

import pytest

from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.errors import ConfigError, ConflictError, CorruptionError, ObjectNotFoundError, StorageError
from vescale_storage.fragment import AbortRecord, encode_abort, encode_fragment
from vescale_storage.keys import abort_key, fragment_key
from vescale_storage.transaction_objects import (
    TransactionObjects,
    clean_transaction,
    find_transactions,
    new_transaction_id,
)
from vescale_storage.wrappers.faults import FaultBackend

TXN, OTHER = "0" * 31 + "1", "0" * 31 + "2"


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


async def put_fragment(backend, transaction, rank, content=b"content"):
    await backend.put(fragment_key(transaction, rank), encode_fragment(transaction, rank, content))


async def put_abort(backend, transaction, rank):
    record = AbortRecord(transaction, rank, "kind", "message")
    await backend.put(abort_key(transaction, rank), [encode_abort(record)])
    return record


def test_ids_are_valid_and_differ():
    made = {new_transaction_id() for _ in range(100)}
    assert len(made) == 100
    assert all(fragment_key(one, 0) for one in made)


def test_listing_and_reading():
    async def main():
        backend = memory()
        objects = TransactionObjects(backend, TXN, 12)
        await put_fragment(backend, TXN, 0)
        await put_fragment(backend, TXN, 11, b"longer content")
        await put_fragment(backend, OTHER, 1)
        record = await put_abort(backend, TXN, 2)
        await backend.put(f"txn/{TXN}/strange", [b"?"])
        present = await objects.list()
        assert present.fragments == {0: 71, 11: 78}
        assert present.aborts.keys() == {2}
        assert await objects.read_fragment(11) == b"longer content"
        assert await objects.read_fragment(11, 78) == b"longer content"
        assert await objects.read_abort(2) == record
        assert await objects.exists(fragment_key(TXN, 0))
        assert not await objects.exists(fragment_key(TXN, 1))
        for reading in (objects.read_fragment(1), objects.read_abort(1)):
            with pytest.raises(ObjectNotFoundError):
                await reading
        with pytest.raises(CorruptionError):
            await objects.read_fragment(11, 77)

    loop.run(main())


def test_a_rank_outside_of_the_world_is_a_conflict():
    async def main():
        backend = memory()
        await put_fragment(backend, TXN, 4)
        with pytest.raises(ConflictError, match="has 4 ranks"):
            await TransactionObjects(backend, TXN, 4).list()

    loop.run(main())


def test_holds_compares_size_and_check():
    async def main():
        backend = FaultBackend(memory())
        objects = TransactionObjects(backend, TXN, 4)
        *_, check = encode_fragment(TXN, 0, b"content")
        key = fragment_key(TXN, 0)
        assert not await objects.holds(key, 71, check)
        await put_fragment(backend, TXN, 0)
        assert await objects.holds(key, 71, check)
        assert not await objects.holds(key, 72, check)
        assert not await objects.holds(key, 71, bytes(32))
        backend.fail("head", StorageError("no network"))
        assert not await objects.holds(key, 71, check)

    loop.run(main())


def test_transactions_are_found_and_cleaned():
    async def main():
        backend = FaultBackend(memory())
        for rank in range(3):
            await put_fragment(backend, TXN, rank)
        await put_abort(backend, TXN, 1)
        await put_fragment(backend, OTHER, 0)
        await backend.put("txn/strange/rank-0", [b"?"])
        await backend.put(f"txn/{TXN}/strange", [b"?"])
        first, second = await find_transactions(backend)
        assert (first.id, first.num_fragments, first.num_aborts) == (TXN, 3, 1)
        assert (second.id, second.num_fragments, second.num_aborts, second.size_bytes) == (OTHER, 1, 0, 71)
        assert first.size_bytes > 3 * 71
        assert first.modified_seconds > 1e9
        await clean_transaction(backend, TXN)
        deletes = [operation.key for operation in backend.operations if operation.verb == "delete"]
        assert deletes[-1] == abort_key(TXN, 1)
        assert [info.key async for info in backend.list(f"txn/{TXN}/")] == []
        assert [found.id for found in await find_transactions(backend)] == [OTHER]
        await clean_transaction(backend, TXN)
        with pytest.raises(ConfigError):
            await clean_transaction(backend, "")

    loop.run(main())
