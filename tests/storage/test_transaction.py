from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from vescale_storage import loop, refs, transaction
from vescale_storage.backends import open_backend
from vescale_storage.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CorruptionError,
    RankFailureError,
    StateError,
    StorageError,
    ThrottledError,
)
from vescale_storage.keys import abort_key, fragment_key
from vescale_storage.transaction import Transaction, find_transactions, new_transaction_id
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend, SimulatedCrash, When

MANIFEST = "ab" * 32
RUN, STEP = "run", 5


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


def begin(backend, world_size=3, **options):
    return Transaction(backend, new_transaction_id(), world_size, **options)


async def commit(txn):
    return await refs.create_ref(txn._backend, RUN, STEP, manifest=MANIFEST, transaction=txn.id, now=1.0)


async def write_all(txn, but=()):
    for rank in range(txn.world_size):
        if rank not in but:
            await txn.write_fragment(rank, b"content of %d" % rank)


@pytest.fixture(autouse=True)
def short_last_looks(monkeypatch):
    monkeypatch.setattr(transaction, "_LAST_LOOK_SECONDS", 0.5)


# ---- the good case


def test_all_ranks_learn_the_commit():
    async def main():
        txn = begin(memory(), 16)

        async def rank(number):
            await asyncio.sleep(0.001 * (number % 5))
            await txn.write_fragment(number, b"content of %d" % number)
            if number:
                return await txn.await_commit(RUN, STEP, 10)
            contents = await txn.collect(10)
            assert contents == [b"content of %d" % rank for rank in range(16)]
            assert all(type(content) is bytes for content in contents)
            ref = await commit(txn)
            await txn.clean()
            return ref

        found = await asyncio.gather(*[rank(number) for number in range(16)])
        assert len(set(found)) == 1
        assert await find_transactions(txn._backend) == ()

    loop.run(main())


def test_any_rank_may_coordinate():
    async def main():
        txn = begin(memory(), 3, coordinator=2)
        await write_all(txn, but={1})
        with pytest.raises(RankFailureError):
            await txn.collect(0.05)
        assert await txn._objects.exists(abort_key(txn.id, 2))

    loop.run(main())


def test_another_transactions_ref_is_not_taken_for_ours():
    async def main():
        backend = memory()
        other, txn = begin(backend), begin(backend)
        await commit(other)
        waiting = asyncio.create_task(txn.await_commit(RUN, STEP, 10))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        mine = await commit(txn)
        assert mine.version == 2
        await commit(begin(backend))  # and the step is saved once more before anybody looks
        assert await waiting == mine

    loop.run(main())


def test_polls_read_each_fragment_once_and_each_ref_once():
    async def main():
        backend = CountingBackend(memory())
        txn = begin(backend, 8)
        await write_all(txn, but={7})
        before = backend.counts
        waiting = asyncio.create_task(txn.collect(10))
        await asyncio.sleep(0.3)
        await txn.write_fragment(7, b"late")
        await waiting
        requests = (backend.counts - before).requests
        assert requests["get_into"] == 8
        assert requests["put_if_absent"] == 1
        assert set(requests) == {"get_into", "list", "put_if_absent"}
        assert 2 < requests["list"] < 60
        for _ in range(3):
            await commit(begin(backend))
        before = backend.counts
        waiting = asyncio.create_task(txn.await_commit(RUN, STEP, 10))
        await asyncio.sleep(0.2)
        assert (backend.counts - before).requests["get_into"] == 3
        await commit(txn)
        await waiting

    loop.run(main())


# ---- writing fragments


@pytest.mark.parametrize("error", [AlreadyExistsError("retried"), StorageError("reset", retryable=True)])
def test_a_fragment_whose_answer_was_lost_is_read_back(error):
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend)
        rule = backend.lose_answer("put_if_absent", error)
        await txn.write_fragment(1, b"content")
        assert rule.num_hit == 1
        await txn.write_fragment(1, b"content")  # the same again is fine

    loop.run(main())


def test_two_processes_of_one_rank_are_noticed():
    async def main():
        txn = begin(memory())
        await txn.write_fragment(1, b"content")
        for other in (b"Content", b"longer content"):
            with pytest.raises(ConflictError, match="running twice"):
                await txn.write_fragment(1, other)

    loop.run(main())


def test_a_fragment_that_cannot_be_written():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend)
        backend.fail("put_if_absent", AccessDeniedError("no"))
        with pytest.raises(AccessDeniedError):
            await txn.write_fragment(1, b"content")

    loop.run(main())


def test_a_rank_that_aborted_writes_no_fragment():
    async def main():
        txn = begin(memory())
        await txn.abort(1, "broken")
        with pytest.raises(StateError, match="has aborted"):
            await txn.write_fragment(1, b"content")

    loop.run(main())


def test_nonsense_is_refused():
    backend = memory()
    for arguments in (("x", 3), (new_transaction_id(), 0), (new_transaction_id(), 10**7 + 1)):
        with pytest.raises(ConfigError):
            Transaction(backend, *arguments)
    with pytest.raises(ConfigError):
        begin(backend, 3, coordinator=3)
    txn = begin(backend, 3)
    for coro in (txn.write_fragment(3, b""), txn.write_fragment(-1, b""), txn.abort(3, ""), txn.collect(-1)):
        with pytest.raises(ConfigError):
            loop.run(coro)


# ---- failures


def test_an_abort_ends_every_wait_at_once_with_the_same_failures():
    async def main():
        txn = begin(memory(), 4)
        await write_all(txn, but={3})
        waits = [asyncio.create_task(txn.await_commit(RUN, STEP, 60)) for _ in (1, 2)]
        waits.append(asyncio.create_task(txn.collect(60)))
        await asyncio.sleep(0.05)
        begun = time.monotonic()
        await txn.abort(3, "disk full on node 17", "no_space")
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, RankFailureError)
            assert error.failures == {3: "no_space: disk full on node 17"}
            assert "rank 3: no_space: disk full on node 17" in str(error)
        assert time.monotonic() - begun < 2

    loop.run(main())


def test_all_aborts_are_told():
    async def main():
        txn = begin(memory(), 8)
        for rank in (1, 4, 6):
            await txn.abort(rank, f"broken {rank}", "storage")
        with pytest.raises(RankFailureError) as caught:
            await txn.await_commit(RUN, STEP, 60)
        assert caught.value.failures == {rank: f"storage: broken {rank}" for rank in (1, 4, 6)}

    loop.run(main())


def test_the_first_abort_of_a_rank_stands():
    async def main():
        txn = begin(memory())
        await txn.abort(1, "first")
        await txn.abort(1, "second")
        with pytest.raises(RankFailureError, match="first"):
            await txn.collect(60)

    loop.run(main())


def test_a_rank_that_never_reports_is_named_to_all_in_bounded_time():
    async def main():
        txn = begin(memory(), 6)
        await write_all(txn, but={2, 3, 5})
        begun = time.monotonic()
        waits = [txn.collect(0.3), *[txn.await_commit(RUN, STEP, 60) for _ in range(2)]]
        first, *others = await asyncio.gather(*waits, return_exceptions=True)
        assert time.monotonic() - begun < 3
        assert isinstance(first, RankFailureError)
        assert set(first.failures) == {2, 3, 5}
        for part in ("waited 0.3 s", "ranks 2-3, 5 of 6", "'collect the fragments'", txn.id):
            assert part in str(first)
        for error in others:
            assert isinstance(error, RankFailureError)
            assert error.failures == first.failures

    loop.run(main())


def test_a_coordinator_that_never_decides_is_named():
    async def main():
        txn = begin(memory(), 3)
        await write_all(txn)
        begun = time.monotonic()
        with pytest.raises(RankFailureError, match="nothing from rank 0 of 3; look") as caught:
            await txn.await_commit(RUN, STEP, 0.2)
        assert 0.7 <= time.monotonic() - begun < 5
        assert set(caught.value.failures) == {0}
        assert caught.value.context["phase"] == "await the commit"

    loop.run(main())


def test_ranks_without_fragment_are_named_beside_a_coordinator_that_never_decides():
    async def main():
        txn = begin(memory(), 4)
        await write_all(txn, but={0, 3})
        with pytest.raises(RankFailureError, match="rank 0 of 4; no fragment from ranks 0, 3") as caught:
            await txn.await_commit(RUN, STEP, 0.1)
        assert set(caught.value.failures) == {0, 3}

    loop.run(main())


def test_waits_that_end_together_blame_the_rank_that_is_missing_and_not_the_coordinator():
    async def main():
        txn = begin(memory(), 4)
        await write_all(txn, but={3})
        waits = [txn.await_commit(RUN, STEP, 0.3), txn.collect(0.3), txn.await_commit(RUN, STEP, 0.2)]
        for error in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(error, RankFailureError)
            assert set(error.failures) == {3}

    loop.run(main())


def test_phases_are_named():
    async def main():
        txn = begin(memory(), 3)
        with pytest.raises(RankFailureError, match="'my phase'"):
            await txn.collect(0, "my phase")
        with pytest.raises(RankFailureError, match="'their phase'"):
            await txn.await_commit(RUN, STEP, 0, "their phase")

    loop.run(main())


def test_an_abort_after_the_fragment_waits_for_the_word_of_the_coordinator():
    async def main():
        txn = begin(memory(), 3)
        await write_all(txn)
        await txn.abort(2, "crashed after its fragment")
        waiting = asyncio.create_task(txn.await_commit(RUN, STEP, 60))
        await asyncio.sleep(0.1)
        assert not waiting.done()  # the coordinator may have collected before the abort
        ref = await commit(txn)
        assert await waiting == ref

    loop.run(main())


def test_a_ref_counts_whatever_abort_records_say():
    async def main():
        txn = begin(memory(), 3)
        await write_all(txn, but={1})
        await txn.abort(1, "broken")
        await txn.abort(0, "broken as well")
        ref = await commit(txn)
        assert await txn.await_commit(RUN, STEP, 60) == ref

    loop.run(main())


def test_a_damaged_fragment_ends_the_save_for_all():
    async def main():
        backend = memory()
        txn = begin(backend, 3)
        await write_all(txn)
        key = fragment_key(txn.id, 2)
        data = bytearray(await backend.get(key))
        data[40] ^= 1
        await backend.put(key, [data])
        with pytest.raises(CorruptionError, match=key):
            await txn.collect(60)
        with pytest.raises(RankFailureError, match=r"rank 0: corruption: .*rank-2"):
            await txn.await_commit(RUN, STEP, 60)

    loop.run(main())


def test_a_damaged_abort_record_is_an_abort():
    async def main():
        backend = memory()
        txn = begin(backend, 3)
        await backend.put(abort_key(txn.id, 1), [b"nonsense"])
        with pytest.raises(RankFailureError) as caught:
            await txn.await_commit(RUN, STEP, 60)
        assert caught.value.failures == {1: "aborted; its record cannot be read"}

    loop.run(main())


def test_two_jobs_under_one_id_are_noticed():
    async def main():
        backend = memory()
        txn = begin(backend, 3)
        await Transaction(backend, txn.id, 8).write_fragment(7, b"content")
        with pytest.raises(ConflictError, match="two jobs use one id"):
            await txn.collect(60)

    loop.run(main())


# ---- storage that stumbles


def test_throttled_polls_go_on():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        await write_all(txn)
        rules = [
            backend.fail("list", ThrottledError("slow down", retryable=True), times=3),
            backend.fail("get_into", StorageError("reset", retryable=True), times=2),
        ]
        await txn.collect(60)
        await commit(txn)
        rules.append(backend.fail("list", StorageError("reset", retryable=True), times=3))
        rules.append(backend.fail("head", StorageError("reset", retryable=True), times=1))
        await txn.await_commit(RUN, STEP, 60)
        assert [rule.num_hit for rule in rules] == [3, 2, 3, 1]

    loop.run(main())


def test_storage_that_hangs_is_left_at_the_deadline_and_named():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        await write_all(txn)
        backend.delay(None, 60, times=10_000)
        begun = time.monotonic()
        for wait in (txn.collect(0.1), txn.await_commit(RUN, STEP, 0.1)):
            with pytest.raises(RankFailureError):
                await wait
        assert time.monotonic() - begun < 10

    loop.run(main())


def test_the_last_error_of_the_storage_is_part_of_the_story():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        backend.fail("list", StorageError("connection refused", retryable=True), times=10_000)
        with pytest.raises(RankFailureError, match="connection refused") as caught:
            await txn.collect(0.1)
        assert isinstance(caught.value.__cause__, StorageError)

    loop.run(main())


def test_storage_that_fails_for_good_is_raised_as_it_is():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        backend.fail("list", AccessDeniedError("expired"), times=2)
        with pytest.raises(AccessDeniedError):
            await txn.collect(60)
        with pytest.raises(AccessDeniedError):
            await txn.await_commit(RUN, STEP, 60)

    loop.run(main())


def hide_listings(backend):
    return backend.truncate("list", 10_000, times=10_000)


def test_no_listing_alone_decides_that_a_fragment_is_missing():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 5)
        await write_all(txn)
        hide_listings(backend)
        contents = await txn.collect(0.1)
        assert contents == [b"content of %d" % rank for rank in range(5)]

    loop.run(main())


def test_no_listing_alone_decides_that_nobody_aborted():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 5)
        await write_all(txn)
        await txn.abort(3, "broken")
        hide_listings(backend)
        with pytest.raises(RankFailureError) as caught:
            await txn.collect(0.1)
        assert set(caught.value.failures) == {3}

    loop.run(main())


def test_no_listing_alone_decides_that_there_is_no_ref():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        await commit(begin(backend))
        ref = await commit(txn)
        hide_listings(backend)
        assert await txn.await_commit(RUN, STEP, 0.1) == ref

    loop.run(main())


def test_no_listing_alone_decides_that_the_coordinator_is_silent():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        await txn.abort(0, "no pack", "corruption")
        hide_listings(backend)
        with pytest.raises(RankFailureError, match="corruption: no pack"):
            await txn.await_commit(RUN, STEP, 0.1)

    loop.run(main())


def test_a_last_look_that_fails_decides_nothing_in_favour_of_the_save():
    async def main():
        backend = FaultBackend(memory())
        txn = begin(backend, 3)
        await write_all(txn)
        hide_listings(backend)
        backend.fail("head", StorageError("reset", retryable=True), prefix=abort_key(txn.id, 1), times=10)
        with pytest.raises(RankFailureError, match="rank 1 of 3"):
            await txn.collect(0.05)

    loop.run(main())


# ---- crashes


async def one_save(backends, txn_id, manifest, deadline_seconds):
    """Save with one back end per rank; return what each rank learned."""
    txns = [Transaction(backend, txn_id, len(backends)) for backend in backends]

    async def rank(number):
        await txns[number].write_fragment(number, b"content of %d" % number)
        if number:
            return await txns[number].await_commit(RUN, STEP, deadline_seconds)
        await txns[0].collect(deadline_seconds)
        ref = await refs.create_ref(backends[0], RUN, STEP, manifest=manifest, transaction=txn_id, now=2.0)
        await txns[0].clean()
        return ref

    return await asyncio.gather(*[rank(number) for number in range(len(backends))], return_exceptions=True)


OLD, NEW = "01" * 32, "02" * 32


async def save_with_a_victim(victim, when, kill_at):
    """Save over an old snapshot while one rank is killed; check what is left; return the operations and the outcome."""
    inner = memory()
    await refs.create_ref(inner, RUN, STEP, manifest=OLD, transaction=new_transaction_id(), now=1.0)
    faulty = FaultBackend(inner, kill_at=kill_at, kill_when=when)
    backends = [faulty if rank == victim else inner for rank in range(2)]
    outcomes = await asyncio.wait_for(one_save(backends, new_transaction_id(), NEW, 1.0), 30)
    stored = await refs.list_refs(inner, RUN, strict=True, all_versions=True)
    assert [ref.manifest for ref in stored] in ([OLD], [OLD, NEW])
    newest = await refs.read_ref(inner, RUN, STEP)
    assert newest == stored[-1]
    assert outcomes[victim] == newest or isinstance(outcomes[victim], SimulatedCrash)
    survivor = outcomes[1 - victim]
    if newest.manifest == NEW:
        assert survivor == newest
    else:
        assert isinstance(survivor, RankFailureError)
        assert victim in survivor.failures
    # A retry under a new transaction succeeds on what is left.
    again = await one_save([inner, inner], new_transaction_id(), NEW, 5)
    assert again[0] == again[1] == await refs.read_ref(inner, RUN, STEP)
    return len(faulty.operations), newest.manifest


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("when", list(When))
def test_killed_at_any_operation_the_old_or_the_new_snapshot_is_there_and_nothing_else(victim, when, monkeypatch):
    monkeypatch.setattr(transaction, "_LAST_LOOK_SECONDS", 0.1)

    async def main():
        num_operations, manifest = await save_with_a_victim(victim, when, None)
        assert manifest == NEW
        assert num_operations > 4
        # Polls make the number of operations vary; some more points than one clean run has cost little.
        points = range(num_operations + 4)
        results = await asyncio.gather(*[save_with_a_victim(victim, when, point) for point in points])
        found = {manifest for _, manifest in results}
        # A rank that dies after its fragment has done its part.
        assert found == ({NEW} if (victim, when) == (1, When.AFTER) else {OLD, NEW})

    loop.run(main())
