from __future__ import annotations

import numpy as np
import pytest

from benchmarks import plan_reshard
from benchmarks.plan_reshard import Model, Tensors, World, manifest_of, plan, table
from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.plan.load_plan import prove_covers

SMALL = Model(num_layers=5, width=512, hidden=1_280, kv_width=64, vocab_size=1_000)
SOURCE, TARGET = World(tp=2, pp=2, dp=3), World(tp=1, pp=3, dp=4)


@pytest.fixture(scope="module")
def tensors():
    return Tensors.of(SMALL, moments=True)


@pytest.mark.parametrize("rank", [0, 5, 11])
def test_a_small_model_is_planned_with_every_byte_written_and_read_once(tensors, rank):
    planned = plan(tensors, SOURCE, TARGET, rank=rank)
    assert planned.written.sum() == planned.read.sum() == tensors.total_bytes
    assert (planned.read + planned.received >= planned.needed).all(), "chunks may hold more than what is needed"
    assert planned.needed.sum() >= tensors.total_bytes
    assert planned.written.max() <= 2 * planned.written.mean()
    assert set(planned.seconds) >= {"save plan", "chunks needed", "share of the reads"}


def test_the_manifest_is_the_one_that_the_save_plan_writes(tensors):
    """Its packs, one a rank, hold as many bytes as the plan gives each rank, but for copies."""
    manifest = manifest_of(tensors, SOURCE)
    prove_covers(manifest)
    held = np.bincount(manifest.chunks.pack, weights=manifest.chunks.length, minlength=SOURCE.size)
    assert held.sum() == tensors.total_bytes
    assert (held > 0).all()


def test_a_chunk_that_is_missing_is_seen(tensors, monkeypatch):
    whole = plan_reshard._chunks_of_kind

    def less(kind, record, boxes):
        return whole(kind, record, boxes[1:] if kind.dim is not None else boxes)

    monkeypatch.setattr(plan_reshard, "_chunks_of_kind", less)
    with pytest.raises(CorruptionError, match="missing"):
        plan(tensors, SOURCE, TARGET)


def test_stages_hold_every_layer_once():
    for num_layers, num_stages in ((126, 16), (126, 8), (5, 3), (2, 4)):
        world = World(tp=1, pp=num_stages, dp=1)
        stages = [world.stage_of(layer, num_layers) for layer in range(-1, num_layers + 1)]
        assert stages == sorted(stages)
        assert (stages[0], stages[-1]) == (0, num_stages - 1)


def test_the_table_says_what_was_planned(tensors):
    lines = list(table(tensors, SOURCE, TARGET, plan(tensors, SOURCE, TARGET)))
    assert f"| bytes | {tensors.total_bytes:,} |" in lines
    assert any(line.startswith("| share of the reads | ") for line in lines)


def test_the_command_prints_it(capsys, monkeypatch):
    arguments = ["plan_reshard", "--layers", "1", "--from", "2,1,2", "--to", "1,1,3"]
    monkeypatch.setattr(plan_reshard.argparse._sys, "argv", arguments)
    plan_reshard.main()
    assert "4 ranks (tp 2, pp 1, dp 2)" in capsys.readouterr().out
