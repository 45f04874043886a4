from __future__ import annotations

import torch

import vescale_ckpt as vc
from vescale_tools.sizes import Totals, tensor_bytes, totals


def test_totals_count_ties_and_stored_chunks_once():
    same, tied = torch.arange(100, dtype=torch.float32), torch.ones(10)
    state = {"a": same.clone(), "b": same.clone(), "c": tied, "d": tied, "none": torch.zeros(0, 5)}
    with vc.open_store("memory://tools-sizes") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(0, state)
        manifest = store["run@0"].manifest
    assert totals(manifest) == Totals(tensors=5, aliases=1, bytes=840, stored_bytes=440, chunks=3, packs=1)
    alias = manifest.find("d")
    assert totals(manifest, [alias]) == Totals(tensors=1, aliases=1, bytes=40, stored_bytes=40, chunks=1, packs=1)
    assert totals(manifest, []) == Totals(tensors=0, aliases=0, bytes=0, stored_bytes=0, chunks=0, packs=0)
    assert tensor_bytes(manifest, manifest.find("none")) == 0
    assert tensor_bytes(manifest, alias) == 40
