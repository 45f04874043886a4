from __future__ import annotations

import uuid

import pytest
import torch

import vescale_ckpt as vc
from vescale_ckpt.repairing.pack_table import ENTRY, PackTable
from vescale_storage import loop
from vescale_storage.pack import ENTRY_BYTES, read_footer


@pytest.fixture
def stored():
    """Save three steps that share tensors, in several packs, one of them compressed."""
    with vc.open_store(f"memory://{uuid.uuid4().hex}") as store:
        for step, codec in ((1, "raw"), (2, "zstd"), (3, "raw")):
            options = vc.SaveOptions(codec=codec, pack_bytes=1 << 20)
            with vc.Checkpointer(store, "run", options=options) as checkpointer:
                state = {"same": torch.arange(100_000), "own": torch.arange(200_000) + step, "few": torch.ones(3)}
                checkpointer.save(step, state)
        yield store


def footer(store, pack):
    return loop.run(read_footer(store.backend, pack.name, pack.size_bytes))


def table_of(store, *steps):
    table = PackTable()
    for step in steps:
        table.add(store[f"run@{step}"].manifest, f"run@{step}")
    return table


def test_an_entry_is_laid_out_as_in_a_footer():
    assert ENTRY.itemsize == ENTRY_BYTES


def test_manifests_together_know_the_footers_of_their_packs(stored):
    table = table_of(stored, 1, 2, 3)
    packs = {pack for step in (1, 2, 3) for pack in stored[f"run@{step}"].manifest.packs}
    assert len(packs) == 3
    for pack in packs:
        assert table.entries(pack.name) == footer(stored, pack)
        assert table.whole(pack.name) == footer(stored, pack)
        assert table.misplaced(pack.name, footer(stored, pack)) == []
        assert table.sizes[pack.name] == pack.size_bytes


def test_who_needs_a_pack(stored):
    table = table_of(stored, 1, 2, 3)
    assert ["run@1", "run@2", "run@3"] in table.holders.values()


def test_a_part_is_not_the_whole(stored):
    table = table_of(stored, 3)  # knows of step 1's packs what it shares
    shared = {pack.name for pack in stored["run@1"].manifest.packs} & table.sizes.keys()
    assert shared
    assert any(table.whole(name) is None for name in shared)


def test_what_a_footer_does_not_say(stored):
    table = table_of(stored, 1)
    pack = max(stored["run@1"].manifest.packs, key=lambda pack: len(footer(stored, pack)))
    entries = footer(stored, pack)
    assert table.misplaced(pack.name, entries[1:]) == [entries[0]]


def test_a_pack_that_no_manifest_names(stored):
    assert table_of(stored, 1).entries("0" * 64) == ()


def test_a_snapshot_without_chunks():
    with vc.open_store(f"memory://{uuid.uuid4().hex}") as store, vc.Checkpointer(store, "run") as checkpointer:
        checkpointer.save(1, {"epoch": 1})
        assert table_of(store, 1).sizes == {}
