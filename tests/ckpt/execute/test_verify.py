from __future__ import annotations

import dataclasses
import uuid

import numpy as np
import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.errors import AccessDeniedError
from vescale_ckpt.execute.read import ReadOptions
from vescale_ckpt.execute.verify import verify_snapshot
from vescale_ckpt.execute.write import WriteOptions
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import pack_key
from vescale_storage.wrappers.faults import FaultBackend


@pytest.fixture
def stored():
    backend = MemoryBackend(uuid.uuid4().hex)
    full = torch.from_numpy(np.random.default_rng(1).random((900, 500), dtype=np.float32))
    state = [
        simulated.replicated("w", (900, 500), 1, full=full),
        simulated.replicated("v", (64, 64), 1, full=full[:64, :64]),
        simulated.replicated("tied", (64, 64), 1, full=full[:64, :64], alias_of="v"),
    ]
    options = WriteOptions(pack_bytes=300_000)
    return backend, simulated.save(backend, state, 1, options=options, block_bytes=1 << 18).manifest


def damage(backend, manifest, pack, at):
    key = pack_key(manifest.packs[pack].name)
    data = bytearray(loop.run(backend.get(key)))
    data[at] ^= 1
    loop.run(backend.put(key, [bytes(data)]))


def test_a_sound_snapshot_has_no_problems_and_is_read_once(stored):
    backend, manifest = stored
    seen = []
    report = verify_snapshot(backend, manifest, ReadOptions(), seen.append)
    assert report.ok
    assert report.problems == []
    assert (report.chunks, report.packs) == (len(manifest.chunks), len(manifest.packs))
    assert report.bytes_read == sum(seen) == int(manifest.chunks.length.sum())
    assert len(seen) == len(manifest.packs) > 3


def test_every_damaged_chunk_is_listed_and_not_only_the_first(stored):
    backend, manifest = stored
    rows = [0, 1, len(manifest.chunks) - 1]
    for row in rows:
        damage(backend, manifest, int(manifest.chunks.pack[row]), int(manifest.chunks.offset[row]))
    report = verify_snapshot(backend, manifest, ReadOptions())
    assert not report.ok
    assert len(report.problems) == len(rows)
    for row, line in zip(rows, sorted(report.problems, key=lambda line: "'w'" not in line), strict=True):
        assert "'w'" in line or (row == rows[-1] and "'v'" in line)


def test_a_footer_a_lost_pack_and_a_cut_one_are_each_told(stored):
    backend, manifest = stored
    damage(backend, manifest, 0, manifest.packs[0].size_bytes - 3)
    loop.run(backend.delete(pack_key(manifest.packs[1].name)))
    cut = pack_key(manifest.packs[2].name)
    loop.run(backend.put(cut, [loop.run(backend.get(cut))[:-5]]))
    report = verify_snapshot(backend, manifest, ReadOptions())
    for pack in manifest.packs[:3]:
        assert any(pack.name in line for line in report.problems), (pack, report.problems)
    assert not any(pack.name in line for pack in manifest.packs[3:] for line in report.problems)


def test_what_the_table_lacks_is_told_without_reading(stored):
    backend, manifest = stored
    tile = manifest.chunks.tile.copy()
    tile[0] = tile[1]
    broken = dataclasses.replace(manifest, chunks=dataclasses.replace(manifest.chunks, tile=tile))
    report = verify_snapshot(backend, broken, ReadOptions())
    assert "not every element was written exactly once" in report.problems[0]


def test_storage_that_cannot_be_asked_is_no_verdict(stored):
    backend, manifest = stored
    faults = FaultBackend(backend)
    faults.fail("get_into", AccessDeniedError("no rights"), times=100)
    with pytest.raises(AccessDeniedError, match="no rights"):
        verify_snapshot(faults, manifest, ReadOptions())


def test_a_sample_reads_so_many_chunks_and_all_footers(stored):
    backend, manifest = stored
    report = verify_snapshot(backend, manifest, ReadOptions(), sample=2, seed=1)
    assert (report.ok, report.chunks, report.packs) == (True, 2, len(manifest.packs))
    whole = verify_snapshot(backend, manifest, ReadOptions(), sample=10**6)
    assert whole.chunks == len(manifest.chunks)


def test_samples_find_what_is_in_them(stored):
    backend, manifest = stored
    for pack in range(len(manifest.packs)):
        damage(backend, manifest, pack, 0)
    found = {len(verify_snapshot(backend, manifest, ReadOptions(), sample=1, seed=seed).problems) for seed in range(20)}
    assert found == {0, 1}
    footer = manifest.packs[0].size_bytes - 1
    damage(backend, manifest, 0, footer)
    assert verify_snapshot(backend, manifest, ReadOptions(), sample=1).problems
