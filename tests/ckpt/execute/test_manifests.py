from __future__ import annotations

import dataclasses
import uuid

import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.errors import CorruptionError, ObjectNotFoundError
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest, store_manifest
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import manifest_key
from vescale_storage.refs import Ref
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.mirror import MirrorBackend


@pytest.fixture
def stored():
    backend = MemoryBackend(uuid.uuid4().hex)
    manifest = simulated.save(backend, [simulated.replicated("w", (4,), 1, full=torch.arange(4.0))], 1).manifest
    name = store_manifest(backend, manifest)
    return backend, manifest, Ref(manifest.run, manifest.step, 1, name, manifest.transaction, 0.0)


def test_a_manifest_comes_back_as_it_was(stored):
    backend, manifest, ref = stored
    assert open_manifest(fetch_manifest(backend, ref), ref) == manifest


def test_the_same_manifest_is_stored_once(stored):
    backend, manifest, ref = stored
    counted = CountingBackend(backend)
    assert store_manifest(counted, manifest) == ref.manifest
    assert counted.counts.up_bytes == 0


def test_a_damaged_object_in_its_place_is_written_again(stored):
    backend, manifest, ref = stored
    loop.run(backend.put(manifest_key(ref.manifest), [b"something else"]))
    assert store_manifest(backend, manifest) == ref.manifest
    assert open_manifest(fetch_manifest(backend, ref), ref) == manifest


def test_a_manifest_that_is_gone_names_its_snapshot_and_its_key(stored):
    backend, _, ref = stored
    loop.run(backend.delete(manifest_key(ref.manifest)))
    with pytest.raises(CorruptionError, match=r"cannot open run@1: its manifest manifests/") as caught:
        fetch_manifest(backend, ref)
    assert caught.value.context == {"key": manifest_key(ref.manifest), "snapshot": "run@1"}
    assert isinstance(caught.value.__cause__, ObjectNotFoundError)


DAMAGE = {
    "cut": lambda data: data[:-1],
    "emptied": lambda data: data[:0],
    "flipped": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "grown": lambda data: data + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_bytes_of_another_digest_are_not_even_decoded(stored, damage):
    backend, _, ref = stored
    key = manifest_key(ref.manifest)
    loop.run(backend.put(key, [damage(loop.run(backend.get(key)))]))
    with pytest.raises(CorruptionError, match=r"do not have the digest in its name") as caught:
        fetch_manifest(backend, ref)
    assert caught.value.context["key"] == key


@pytest.mark.parametrize("other", [{"run": "other"}, {"step": 2}])
def test_a_ref_that_points_to_the_manifest_of_another_snapshot_is_refused(stored, other):
    backend, _, ref = stored
    wrong = dataclasses.replace(ref, **other)
    with pytest.raises(
        CorruptionError, match=f"cannot open {wrong.run}@{wrong.step}: its ref points to the manifest of run@1"
    ):
        open_manifest(fetch_manifest(backend, wrong), wrong)


def test_one_that_arrived_damaged_does_not_stay_in_the_cache(stored, tmp_path):
    backend, manifest, ref = stored
    faults = FaultBackend(backend)
    cache = CacheBackend(faults, tmp_path, 1 << 30)
    rule = faults.corrupt("get")
    for _ in range(2):
        assert open_manifest(fetch_manifest(cache, ref), ref) == manifest
    assert rule.num_hit == 1


@pytest.mark.parametrize("damage", [*DAMAGE, None])
def test_a_damaged_or_lost_one_is_read_from_the_mirror(stored, damage, caplog):
    backend, manifest, ref = stored
    key = manifest_key(ref.manifest)
    data = loop.run(backend.get(key))
    mirror = MemoryBackend(uuid.uuid4().hex)
    loop.run(mirror.put(key, [data]))
    loop.run(backend.put(key, [DAMAGE[damage](data)]) if damage else backend.delete(key))
    assert open_manifest(fetch_manifest(MirrorBackend(backend, mirror), ref), ref) == manifest
    assert mirror.url in caplog.text
    loop.run(mirror.put(key, [b"damaged, too"]))
    with pytest.raises(CorruptionError):
        fetch_manifest(MirrorBackend(backend, mirror), ref)
