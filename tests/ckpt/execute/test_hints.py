from __future__ import annotations

import numpy as np
import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.execute.hints import SMALL_SNAPSHOT, Hints, decode_hints, encode_hints
from vescale_ckpt.format.manifest import encode_manifest, manifest_name
from vescale_storage import loop
from vescale_storage.keys import index_key, manifest_key

WIDE = vc.SaveOptions(dedup_across_runs=True)


@pytest.fixture
def store(request):
    return vc.open_store(f"memory://hints-{request.node.name}")


def _weights(seed):
    return torch.randn(1500, 1000, generator=torch.Generator().manual_seed(seed))


def test_the_same_weights_in_another_run_are_not_written_again(store):
    weights = _weights(1)
    first = vc.Checkpointer(store, "first").save(1, {"w": weights}).result()
    wide = vc.Checkpointer(store, "second", options=WIDE).save(1, {"renamed": weights}).result()
    assert first.bytes_written > 6_000_000
    assert wide.bytes_written == 0
    assert wide.bytes_deduplicated == wide.bytes_total
    assert torch.equal(store["second@1"].read("renamed"), weights)


def test_without_the_option_only_the_own_run_counts(store):
    vc.Checkpointer(store, "first").save(1, {"w": _weights(1)})
    assert vc.Checkpointer(store, "second").save(1, {"w": _weights(1)}).result().bytes_written > 6_000_000


def test_manifests_that_have_nothing_in_common_are_not_read(store):
    for n in range(5):
        vc.Checkpointer(store, f"run-{n}").save(1, {"w": _weights(n)})
    hints = Hints(store.backend)
    hints.refresh()
    names = hints.find(store["run-3@1"].manifest.chunks.digest[0].tobytes())
    assert names == [store["run-3@1"].ref.manifest]
    assert hints.find(b"\0" * 32) == []


def test_a_damaged_hint_costs_bytes_and_nothing_else(store):
    vc.Checkpointer(store, "first").save(1, {"w": _weights(1)})
    key = index_key(store["first@1"].ref.manifest)
    data = bytearray(loop.run(store.backend.get(key)))
    data[len(data) // 2] ^= 1
    loop.run(store.backend.put(key, [bytes(data)]))
    report = vc.Checkpointer(store, "second", options=WIDE).save(1, {"w": _weights(1)}).result()
    assert report.bytes_written > 6_000_000
    assert torch.equal(store["second@1"].read("w"), _weights(1))


def test_a_hint_to_a_manifest_that_is_gone_is_passed_over(store):
    vc.Checkpointer(store, "first").save(1, {"w": _weights(1)})
    ref = store["first@1"].ref

    loop.run(store.backend.delete(manifest_key(ref.manifest)))
    assert vc.Checkpointer(store, "second", options=WIDE).save(1, {"w": _weights(1)}).result().bytes_written > 6_000_000


def test_every_flipped_byte_and_every_cut_is_found(store):
    vc.Checkpointer(store, "first").save(1, {"w": torch.arange(8.0)})
    manifest = store["first@1"].manifest
    name = manifest_name(encode_manifest(manifest))
    good = encode_hints(manifest, name)
    assert decode_hints(good, name).shape == (1, 32)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 0x40
        with pytest.raises(CorruptionError):
            decode_hints(bytes(bad), name)
        with pytest.raises(CorruptionError):
            decode_hints(good[:at], name)


def test_of_many_chunks_one_in_64_is_a_hint(store):
    vc.Checkpointer(store, "first").save(1, {"w": torch.arange(8.0)})
    manifest = store["first@1"].manifest
    many = np.random.default_rng(0).integers(0, 256, (SMALL_SNAPSHOT * 8, 32), dtype=np.uint8)
    object.__setattr__(manifest.chunks, "digest", many)
    found = decode_hints(encode_hints(manifest, "ab" * 32), "ab" * 32)
    assert 0.5 < len(found) * 64 / len(many) < 2
    assert (found[:, 0] < 4).all()
