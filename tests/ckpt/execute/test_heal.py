from __future__ import annotations

import uuid

import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.errors import AccessDeniedError, CorruptionError
from vescale_ckpt.execute.heal import heal_snapshot
from vescale_ckpt.execute.manifests import store_manifest
from vescale_ckpt.execute.write import WriteOptions
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import manifest_key, pack_key
from vescale_storage.refs import Ref
from vescale_storage.wrappers.faults import FaultBackend


class Copies:
    """A snapshot of several packs in two places."""

    def __init__(self):
        self.first, self.second = (MemoryBackend(uuid.uuid4().hex) for _ in range(2))
        full = torch.rand((700, 500), generator=torch.Generator().manual_seed(1))
        spreads = [simulated.replicated("w", (700, 500), 1, full=full)]
        manifest = simulated.save(self.first, spreads, 1, options=WriteOptions(pack_bytes=1 << 19)).manifest
        name = store_manifest(self.first, manifest)
        self.ref = Ref(manifest.run, manifest.step, 1, name, manifest.transaction, 0.0)
        self.keys = [manifest_key(name), *(pack_key(pack.name) for pack in manifest.packs)]
        self.sizes = [pack.size_bytes for pack in manifest.packs]
        self.contents = {key: loop.run(self.first.get(key)) for key in self.keys}
        for key, content in self.contents.items():
            loop.run(self.second.put(key, [content]))

    def flip(self, backend, key):
        data = bytearray(loop.run(backend.get(key)))
        data[9] ^= 1
        loop.run(backend.put(key, [data]))

    def heal(self, **options):
        return heal_snapshot([self.first, self.second], self.ref, **options)


@pytest.fixture
def copies():
    return Copies()


def test_a_sound_snapshot_is_checked_and_left_as_it_is(copies):
    copies.first = FaultBackend(copies.first)
    seen = []
    report = copies.heal(progress=seen.append)
    assert (report.snapshot, report.checked, report.healed, report.lost) == ("run@1", len(copies.keys), (), ())
    assert report.ok
    assert seen == copies.sizes
    assert len(seen) > 1
    assert {operation.verb for operation in copies.first.operations} == {"get", "get_into", "head"}


def test_everything_that_is_damaged_is_written_anew(copies):
    for number, key in enumerate(copies.keys):
        if number % 2:
            loop.run(copies.first.delete(key))
        else:
            copies.flip(copies.first, key)
    report = copies.heal()
    assert report.healed == tuple(copies.keys)
    assert {key: loop.run(copies.first.get(key)) for key in copies.keys} == copies.contents
    assert copies.heal().healed == ()


def test_what_is_lost_in_both_is_told_and_the_rest_is_healed(copies):
    _, one, other, *_ = copies.keys
    for backend, key in ((copies.first, one), (copies.second, one), (copies.first, other)):
        copies.flip(backend, key)
    report = copies.heal()
    assert not report.ok
    assert report.healed == (other,)
    (line,) = report.lost
    assert one in line


def test_without_a_manifest_nothing_is_touched(copies):
    for backend in (copies.first, copies.second):
        copies.flip(backend, copies.keys[0])
    copies.flip(copies.first, copies.keys[1])
    before = loop.run(copies.first.get(copies.keys[1]))
    with pytest.raises(CorruptionError, match="cannot repair"):
        copies.heal()
    assert loop.run(copies.first.get(copies.keys[1])) == before


def test_storage_that_fails_is_no_loss(copies):
    copies.flip(copies.first, copies.keys[1])
    copies.first = FaultBackend(copies.first)
    rule = copies.first.fail("put", AccessDeniedError("no"))
    with pytest.raises(AccessDeniedError):
        copies.heal()
    assert rule.num_hit == 1
