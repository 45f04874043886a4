from __future__ import annotations

import uuid

import pytest

from vescale_storage import loop, refs
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.collect.versions import create_next_version, delete_versions, list_run
from vescale_storage.errors import ConflictError, CorruptionError, ObjectNotFoundError, StorageError
from vescale_storage.keys import ref_key, tag_key
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend

MANIFEST = "ab" * 32


def memory():
    return MemoryBackend(uuid.uuid4().hex)


def save(backend, step, transaction=1, run="run"):
    return loop.run(
        refs.create_ref(
            backend, run, step, manifest=MANIFEST, transaction=f"{transaction:032x}", now=float(transaction)
        )
    )


def flip(backend, key):
    data = bytearray(loop.run(backend.get(key)))
    data[-2] ^= 1
    loop.run(backend.put(key, [data]))


def test_a_run_is_listed_with_the_times_of_its_commits_and_each_ref_is_read_once():
    backend = CountingBackend(memory())
    save(backend, 5, 1)
    save(backend, 5, 2)
    save(backend, 7, 3)
    save(backend, 9, 9, run="other")
    known: dict[str, float] = {}
    before = backend.counts
    listing = loop.run(list_run(backend, "run", known))
    assert listing.committed_seconds == {5: {1: 1.0, 2: 2.0}, 7: {1: 3.0}}
    assert listing.tags == ()
    assert (backend.counts - before).requests == {"list": 1, "get_into": 3}
    save(backend, 8, 4)
    before = backend.counts
    assert loop.run(list_run(backend, "run", known)).committed_seconds[8] == {1: 4.0}
    assert (backend.counts - before).requests == {"list": 1, "get_into": 1}


def test_tags_are_read_and_a_damaged_one_is_an_error():
    backend = memory()
    save(backend, 5)
    save(backend, 7)
    for name in ("z", "a"):
        loop.run(refs.set_tag(backend, "run", name, 7, now=1.0))
    listing = loop.run(list_run(backend, "run"))
    assert (listing.tags_of(7), listing.tags_of(5)) == (("a", "z"), ())
    flip(backend, tag_key("run", "a"))
    with pytest.raises(CorruptionError):
        loop.run(list_run(backend, "run"))


def test_a_damaged_ref_still_counts_by_the_storages_time_and_a_vanished_one_does_not():
    backend = FaultBackend(memory())
    first, second = save(backend, 5), save(backend, 7)
    flip(backend, first.key)
    backend.fail("get_into", ObjectNotFoundError("gone"), prefix=second.key)
    listing = loop.run(list_run(backend, "run"))
    assert set(listing.committed_seconds) == {5}
    assert listing.committed_seconds[5][1] > 1e9


def test_versions_go_one_by_one_from_the_lowest():
    backend = FaultBackend(memory())
    for transaction in range(1, 5):
        save(backend, 5, transaction)
    assert loop.run(delete_versions(backend, "run", 5, [2, 1, 3])) is True
    deleted = [op.key for op in backend.operations if op.verb == "delete"]
    assert deleted == [ref_key("run", 5, version) for version in (1, 2, 3)]
    assert loop.run(refs.read_ref(backend, "run", 5)).version == 4
    assert loop.run(delete_versions(backend, "run", 5, [1])) is True, "gone already is fine"


def test_versions_of_a_tagged_step_stay():
    backend = memory()
    save(backend, 5)
    loop.run(refs.set_tag(backend, "run", "best", 5, now=1.0))
    assert loop.run(delete_versions(backend, "run", 5, [1])) is False
    assert loop.run(refs.read_ref(backend, "run", 5)).version == 1


def test_the_next_version_is_created_or_somebody_elses_stays():
    backend = memory()
    old = save(backend, 5)
    made = loop.run(create_next_version(backend, old, manifest="cd" * 32, transaction="f" * 32, now=9.0))
    assert (made.version, made.manifest, made.created_seconds) == (2, "cd" * 32, 9.0)
    again = loop.run(create_next_version(backend, old, manifest="ee" * 32, transaction="f" * 32, now=9.0))
    assert again == made, "another of the same transaction was first"
    with pytest.raises(ConflictError, match="version 2 is there already"):
        loop.run(create_next_version(backend, old, manifest="cd" * 32, transaction="e" * 32, now=9.0))


def test_a_lost_answer_is_read_back():
    backend = FaultBackend(memory())
    old = save(backend, 5)
    backend.lose_answer("put_if_absent", StorageError("reset"))
    made = loop.run(create_next_version(backend, old, manifest="cd" * 32, transaction="f" * 32, now=9.0))
    assert made.version == 2
