from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid

import pytest

from vescale_storage import loop, refs
from vescale_storage.backends import open_backend
from vescale_storage.errors import (
    AlreadyExistsError,
    ConfigError,
    ConflictError,
    CorruptionError,
    FormatError,
    ObjectNotFoundError,
    RefNotFoundError,
    StorageError,
)
from vescale_storage.refs import Ref, create_ref
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend

MANIFEST = "ab" * 32


def memory():
    return open_backend(f"memory://{uuid.uuid4().hex}")


def txn(number: int) -> str:
    return f"{number:032x}"


async def save(backend, run: str, step: int, transaction: int = 1, now: float = 1.0) -> Ref:
    return await create_ref(backend, run, step, manifest=MANIFEST, transaction=txn(transaction), now=now)


async def flip(backend, key: str, position: int = -5) -> None:
    data = bytearray(await backend.get(key))
    data[position] ^= 1
    await backend.put(key, [data])


# ---- creating


def test_versions_start_at_1_and_readers_take_the_highest():
    async def main():
        backend = memory()
        first = await save(backend, "run", 5, 1)
        second = await save(backend, "run", 5, 2)
        assert (first.version, second.version) == (1, 2)
        assert first.key == "refs/run/000000000005.000001"
        assert await refs.read_ref(backend, "run", 5) == second
        assert await refs.read_ref_version(backend, "run", 5, 1) == first

    loop.run(main())


def test_creating_twice_for_one_transaction_makes_one_version():
    async def main():
        backend = memory()
        first = await save(backend, "run", 5, 1, now=1.0)
        assert await save(backend, "run", 5, 1, now=2.0) == first
        assert len(await refs.list_ref_keys(backend, "run")) == 1

    loop.run(main())


def test_a_first_save_costs_a_listing_and_a_put():
    async def main():
        backend = CountingBackend(memory())
        await save(backend, "run", 5)
        assert backend.counts.requests == {"list": 1, "put_if_absent": 1}

    loop.run(main())


@pytest.mark.parametrize(
    "error",
    [AlreadyExistsError("made by the retry of a request whose answer was lost"), StorageError("reset", retryable=True)],
)
def test_a_lost_answer_is_read_back_and_makes_no_second_version(error):
    async def main():
        inner = memory()
        backend = FaultBackend(inner)
        rule = backend.lose_answer("put_if_absent", error, prefix="refs/")
        ref = await save(backend, "run", 5)
        assert rule.num_hit == 1
        assert ref.version == 1
        assert await refs.list_refs(inner, "run", all_versions=True) == (ref,)

    loop.run(main())


def test_another_transaction_under_the_key_is_not_mistaken_for_ours():
    async def main():
        backend = FaultBackend(memory())
        await save(backend.inner, "run", 5, 1)
        # As if the other one came between our listing and our put.
        rule = backend.truncate("list", 1, prefix="refs/run/")
        ref = await save(backend, "run", 5, 2)
        assert rule.num_hit == 1
        assert ref.version == 2
        assert (await refs.read_ref_version(backend, "run", 5, 1)).transaction == txn(1)

    loop.run(main())


def test_concurrent_creators_each_get_a_version_and_none_is_lost():
    async def main():
        backend = memory()
        made = await asyncio.gather(*[save(backend, "run", 5, number) for number in range(40)])
        assert sorted(ref.version for ref in made) == list(range(1, 41))
        stored = await refs.list_refs(backend, "run", all_versions=True)
        assert {ref.transaction for ref in stored} == {txn(number) for number in range(40)}
        assert {ref.version: ref for ref in made} == {ref.version: ref for ref in stored}

    loop.run(main())


def test_a_damaged_newest_version_is_healed_by_the_next_save_and_hidden_from_nobody_before():
    async def main():
        backend = memory()
        await save(backend, "run", 5, 1)
        second = await save(backend, "run", 5, 2)
        await flip(backend, second.key)
        with pytest.raises(CorruptionError, match=second.key):
            await refs.read_ref(backend, "run", 5)
        with pytest.raises(CorruptionError):
            await refs.list_refs(backend, "run")
        third = await save(backend, "run", 5, 3)
        assert third.version == 3
        assert await refs.read_ref(backend, "run", 5) == third

    loop.run(main())


def test_a_damaged_object_met_at_the_put_is_stepped_over():
    async def main():
        backend = FaultBackend(memory())
        await flip(backend.inner, (await save(backend.inner, "run", 5, 1)).key)
        backend.truncate("list", 1, prefix="refs/run/")
        assert (await save(backend, "run", 5, 2)).version == 2

    loop.run(main())


def test_nonsense_is_refused_before_anything_is_written():
    async def main():
        backend = memory()
        for change in ({"manifest": "x"}, {"transaction": "x"}, {"now": -1.0}):
            arguments = {"manifest": MANIFEST, "transaction": txn(1), "now": 1.0, **change}
            with pytest.raises(ConfigError):
                await create_ref(backend, "run", 5, **arguments)
        for run, step in (("a/b", 5), ("run", -1)):
            with pytest.raises(ConfigError):
                await save(backend, run, step)
        assert await refs.list_runs(backend) == ()

    loop.run(main())


def test_versions_end_somewhere():
    async def main():
        backend = memory()
        ref = Ref("run", 5, 10**6 - 1, MANIFEST, txn(1), 1.0)
        await backend.put(ref.key, [refs.encode_ref(ref)])
        with pytest.raises(ConflictError, match="all 999999 versions"):
            await save(backend, "run", 5, 2)

    loop.run(main())


# ---- reading


def test_latest_is_by_number():
    async def main():
        backend = memory()
        for step in (9, 10, 100, 2):
            await save(backend, "run", step, step)
        again = await save(backend, "run", 100, 7)
        assert await refs.latest_ref(backend, "run") == again
        assert [ref.step for ref in await refs.list_refs(backend, "run")] == [2, 9, 10, 100]
        assert [tuple(key[1:]) for key in await refs.list_ref_keys(backend, "run")] == [
            (2, 1),
            (9, 1),
            (10, 1),
            (100, 1),
            (100, 2),
        ]
        assert len(await refs.list_refs(backend, "run", all_versions=True)) == 5

    loop.run(main())


def test_runs_are_kept_apart():
    async def main():
        backend = memory()
        names = ["a", "a b", "a.b", "b*[?", "模型"]
        for number, run in enumerate(names):
            await save(backend, run, number)
        assert await refs.list_runs(backend) == tuple(sorted(names))
        for number, run in enumerate(names):
            assert [ref.step for ref in await refs.list_refs(backend, run)] == [number]

    loop.run(main())


def test_what_is_not_there():
    async def main():
        backend = memory()
        await save(backend, "run", 5)
        for coro in (
            refs.read_ref(backend, "run", 6),
            refs.read_ref(backend, "ru", 5),
            refs.read_ref_version(backend, "run", 5, 2),
            refs.latest_ref(backend, "other"),
            refs.read_tag(backend, "run", "best"),
            refs.delete_tag(backend, "run", "best"),
            refs.delete_ref(backend, "run", 6),
            refs.set_tag(backend, "run", "best", 6, now=1.0),
            refs.resolve(backend, "run@6"),
            refs.resolve(backend, "run@best"),
            refs.resolve(backend, "other"),
        ):
            with pytest.raises(RefNotFoundError):
                await coro
        assert await refs.list_refs(backend, "other") == ()
        assert await refs.list_tags(backend, "other") == ()

    loop.run(main())


def test_strange_keys_are_ignored_unless_asked_for():
    async def main():
        backend = memory()
        ref = await save(backend, "run", 5)
        strange = [
            "refs/run/latest",
            "refs/run/000000000005.1",
            "refs/run/tags/a/b",
            "refs/run/000000000006.000001.tmp",
        ]
        for key in strange:
            await backend.put(key, [b"?"])
        await backend.put("refs/orphan", [b"?"])
        assert await refs.list_refs(backend, "run") == (ref,)
        assert await refs.latest_ref(backend, "run") == ref
        assert await refs.read_ref(backend, "run", 5) == ref
        assert await refs.list_runs(backend) == ("run",)
        assert await refs.list_tags(backend, "run") == ()
        assert (await save(backend, "run", 5, 9)).version == 2
        for reading in (refs.list_refs(backend, "run", strict=True), refs.list_ref_keys(backend, "run", strict=True)):
            with pytest.raises(FormatError, match="4 keys") as caught:
                await reading
            assert sorted(caught.value.context["keys"]) == sorted(strange)

    loop.run(main())


def test_an_object_too_long_for_a_ref_is_not_read():
    async def main():
        backend = FaultBackend(memory())
        await backend.put("refs/run/000000000005.000001", [b"x" * 100_000])
        with pytest.raises(CorruptionError, match="100000 bytes"):
            await refs.read_ref(backend, "run", 5)
        assert {operation.verb for operation in backend.operations} == {"put", "list"}

    loop.run(main())


def test_a_ref_that_is_deleted_while_it_is_read():
    async def main():
        backend = FaultBackend(memory())
        ref = await save(backend, "run", 5)
        for read in (lambda: refs.read_ref(backend, "run", 5), lambda: refs.latest_ref(backend, "run")):
            rule = backend.fail("get_into", ObjectNotFoundError("gone"), times=2)
            assert await read() == ref
            assert rule.num_hit == 2
            rule = backend.fail("get_into", ObjectNotFoundError("gone"), times=100)
            with pytest.raises(RefNotFoundError):
                await read()
            backend.rules.clear()
        backend.fail("get_into", ObjectNotFoundError("gone"))
        assert await refs.list_refs(backend, "run") == ()

    loop.run(main())


def test_resolve():
    async def main():
        backend = memory()
        five, six = await save(backend, "run", 5), await save(backend, "run", 6)
        await refs.set_tag(backend, "run", "best", 5, now=2.0)
        assert await refs.resolve(backend, "run") == six
        assert await refs.resolve(backend, "run@5") == five
        assert await refs.resolve(backend, "run@best") == five
        assert await refs.resolve(backend, refs.SnapshotName("run", step=6)) == six

    loop.run(main())


# ---- tags


def test_tags_stay_where_they_are():
    async def main():
        backend = memory()
        first = await save(backend, "run", 5, 1)
        tag = await refs.set_tag(backend, "run", "best", 5, now=2.0)
        assert tag.ref == first
        assert await refs.set_tag(backend, "run", "best", 5, now=3.0) == tag
        assert await refs.read_tag(backend, "run", "best") == tag
        second = await save(backend, "run", 5, 2)  # saved again: the tag stays with the first
        assert (await refs.read_tag(backend, "run", "best")).ref == first
        await save(backend, "run", 6, 3)
        for step in (5, 6):
            with pytest.raises(ConflictError, match="step 5 version 1 and tags do not move"):
                await refs.set_tag(backend, "run", "best", step, now=4.0)
        await refs.delete_tag(backend, "run", "best")
        assert (await refs.set_tag(backend, "run", "best", 5, now=4.0)).ref == second

    loop.run(main())


def test_tags_are_listed_by_name_and_do_not_disturb_the_listing_of_refs():
    async def main():
        backend = memory()
        await save(backend, "run", 5)
        for name in ("zeta", "alpha", "0000 x", "000000000009.000001x"):
            await refs.set_tag(backend, "run", name, 5, now=1.0)
        assert [tag.name for tag in await refs.list_tags(backend, "run")] == [
            "0000 x",
            "000000000009.000001x",
            "alpha",
            "zeta",
        ]
        assert len(await refs.list_refs(backend, "run", strict=True)) == 1

    loop.run(main())


def test_tags_protect_their_step_until_they_are_deleted():
    async def main():
        backend = memory()
        await save(backend, "run", 5, 1)
        await save(backend, "run", 5, 2)
        await save(backend, "run", 6, 3)
        await refs.set_tag(backend, "run", "best", 5, now=1.0)
        with pytest.raises(ConflictError, match="best"):
            await refs.delete_ref(backend, "run", 5)
        await refs.delete_ref(backend, "run", 6)
        await refs.delete_tag(backend, "run", "best")
        await refs.delete_ref(backend, "run", 5)
        assert await refs.list_ref_keys(backend, "run") == ()

    loop.run(main())


def test_a_damaged_tag_protects_too_and_can_be_deleted():
    async def main():
        backend = memory()
        await save(backend, "run", 5)
        tag = await refs.set_tag(backend, "run", "best", 5, now=1.0)
        await flip(backend, tag.key)
        with pytest.raises(CorruptionError):
            await refs.delete_ref(backend, "run", 5)
        await refs.delete_tag(backend, "run", "best")
        await refs.delete_ref(backend, "run", 5)

    loop.run(main())


def test_deleting_goes_from_the_oldest_version_on():
    async def main():
        inner = memory()
        for number in range(3):
            newest = await save(inner, "run", 5, number)
        backend = FaultBackend(inner)
        backend.fail("delete", StorageError("no network"), skip=1)
        with pytest.raises(StorageError):
            await refs.delete_ref(backend, "run", 5)
        assert await refs.read_ref(inner, "run", 5) == newest  # no older one has come back

    loop.run(main())


def test_a_tag_set_on_a_step_that_is_deleted_meanwhile_is_taken_back():
    async def main():
        inner = memory()
        ref = await save(inner, "run", 5)
        backend = FaultBackend(inner)
        backend.fail("head", ObjectNotFoundError("deleted"), prefix=ref.key)
        with pytest.raises(RefNotFoundError):
            await refs.set_tag(backend, "run", "best", 5, now=1.0)
        assert await refs.list_tags(inner, "run") == ()

    loop.run(main())


def test_concurrent_setters_of_a_tag_agree_on_one():
    async def main():
        backend = memory()
        for step in range(8):
            await save(backend, "run", step, step)
        results = await asyncio.gather(
            *[refs.set_tag(backend, "run", "best", step, now=1.0) for step in range(8)], return_exceptions=True
        )
        winners = [result for result in results if isinstance(result, refs.Tag)]
        assert len(winners) == 1
        assert sum(isinstance(result, ConflictError) for result in results) == 7
        assert await refs.read_tag(backend, "run", "best") == winners[0]

    loop.run(main())


CREATOR = """
import sys
from vescale_storage import loop, refs
from vescale_storage.backends import open_backend

backend, first = open_backend(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, first + 5):
    made = refs.create_ref(backend, "run", 5, manifest="ab" * 32, transaction=f"{number:032x}", now=1.0)
    print(loop.run(made).version, flush=True)
"""


def test_racing_processes_each_get_versions_and_none_is_lost(tmp_path):
    commands = [[sys.executable, "-c", CREATOR, str(tmp_path), str(5 * number)] for number in range(3)]
    creators = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    assert [creator.stdout.readline() for creator in creators] == ["ready\n"] * 3
    for creator in creators:
        creator.stdin.write("\n")
        creator.stdin.flush()
    versions = [int(version) for creator in creators for version in creator.communicate(timeout=60)[0].split()]
    assert sorted(versions) == list(range(1, 16))
    stored = loop.run(refs.list_refs(open_backend(tmp_path), "run", strict=True, all_versions=True))
    assert {ref.transaction for ref in stored} == {f"{number:032x}" for number in range(15)}
