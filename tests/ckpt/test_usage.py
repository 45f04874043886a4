from __future__ import annotations

import torch

import vescale_ckpt as vc
from vescale_ckpt.usage import Usage, by_name, measure


def manifests(states, options=None):
    with vc.open_store(f"memory://usage-{id(states)}") as store:
        with vc.Checkpointer(store, "run", options=options) as checkpointer:
            for step, state in enumerate(states):
                checkpointer.save(step, state)
        return [store[f"run@{step}"].manifest for step in range(len(states))]


def test_what_is_shared_counts_for_the_first_and_belongs_to_nobody_alone():
    a, b, c = (torch.arange(1000) + 5000 * i for i in range(3))
    usage = measure(manifests([{"x": a, "y": b}, {"x": a}, {"x": a, "z": c}]))
    assert [each.new_bytes for each in usage.snapshots] == [16_000, 0, 8_000]
    assert [each.own_bytes for each in usage.snapshots] == [8_000, 0, 8_000]
    assert [each.stored_bytes for each in usage.snapshots] == [16_000, 8_000, 16_000]
    assert (usage.tensor_bytes, usage.stored_bytes, usage.saved_bytes) == (40_000, 24_000, 16_000)
    assert len(usage.packs) == 2


def test_ties_and_equal_tensors_count_once_in_storage():
    tied = torch.arange(1000)
    usage = measure(manifests([{"a": tied, "b": tied, "c": tied.clone()}]))
    assert (usage.tensor_bytes, usage.stored_bytes) == (16_000, 8_000)


def test_compression_is_seen():
    usage = measure(manifests([{"a": torch.zeros(100_000)}], vc.SaveOptions(codec="zstd")))
    assert usage.stored_bytes < usage.tensor_bytes / 100


def test_nothing():
    assert measure([]) == Usage((), 0, 0, {})
    usage = measure(manifests([{"epoch": 1}]))
    assert (usage.tensor_bytes, usage.stored_bytes, len(usage.snapshots)) == (0, 0, 1)


def test_by_name():
    tied = torch.arange(1000)
    state = {"m": {"l.0.w": tied, "l.1.w": torch.arange(500)}, "o": {"w": tied, "e": torch.zeros(0, 3)}}
    manifest = manifests([state])[0]
    assert [(n.name, n.tensors, n.tensor_bytes, n.stored_bytes) for n in by_name(manifest)] == [
        ("m.l.0.w", 1, 8000, 8000),
        ("m.l.1.w", 1, 4000, 4000),
        ("o.w", 1, 0, 0),
        ("o.e", 1, 0, 0),
    ]
    assert [(n.name, n.tensors, n.tensor_bytes) for n in by_name(manifest, 1)] == [("m", 2, 12_000), ("o", 2, 0)]
    assert [n.name for n in by_name(manifest, 2)] == ["m.l", "o.w", "o.e"]
