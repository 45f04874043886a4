from __future__ import annotations

import dataclasses
import uuid

import numpy as np
import torch

from tests.distributed import simulated
from vescale_ckpt.execute.dedup import DedupIndex, Location
from vescale_storage.backends.memory import MemoryBackend


def manifest(*values, shape=(300, 500)):
    tensors = [
        simulated.replicated(f"w{v}", shape, 1, full=torch.full(shape, float(v)) + torch.rand(shape)) for v in values
    ]
    return simulated.save(MemoryBackend(uuid.uuid4().hex), tensors, 1).manifest


def test_every_chunk_of_every_manifest_is_found():
    manifests = [manifest(1, 2), manifest(3)]
    index = DedupIndex(manifests)
    for made in manifests:
        chunks = made.chunks
        for row in range(len(chunks)):
            found = index.find(chunks.digest[row].tobytes())
            pack = made.packs[int(chunks.pack[row])]
            assert found == Location(pack, int(chunks.offset[row]), int(chunks.length[row]), int(chunks.codec[row]))


def test_nothing_else_is_found():
    assert DedupIndex([]).find(b"\0" * 32) is None
    index = DedupIndex([manifest(1)])
    assert index.find(b"\0" * 32) is None
    assert index.find(b"\xff" * 32) is None


def test_digests_that_begin_alike_are_told_apart():
    made = manifest(1, shape=(512, 512))
    names = np.zeros_like(made.chunks.digest)
    names[:, :8] = 7
    names[:, 31] = np.arange(len(names))
    assert len(names) > 2
    index = DedupIndex([dataclasses.replace(made, chunks=dataclasses.replace(made.chunks, digest=names))])
    for row in range(len(names)):
        assert index.find(names[row].tobytes()).offset == int(made.chunks.offset[row])
    assert index.find(bytes([7] * 8 + [0] * 23 + [200])) is None


def test_the_first_manifest_that_has_a_chunk_says_where():
    tensor = simulated.replicated("w", (10,), 1, full=torch.arange(10.0))
    other = simulated.replicated("v", (10,), 1, full=torch.ones(10))
    one = simulated.save(MemoryBackend(uuid.uuid4().hex), [tensor], 1).manifest
    two = simulated.save(MemoryBackend(uuid.uuid4().hex), [tensor, other], 1).manifest
    name = one.chunks.digest[0].tobytes()
    assert DedupIndex([one, two]).find(name).pack == one.packs[0]
    assert DedupIndex([two, one]).find(name).pack == two.packs[0]
