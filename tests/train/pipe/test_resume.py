"""A pipeline's checkpoint is that of the model: any other cut goes on from it, to the bit, in new processes."""

from __future__ import annotations

from pathlib import Path

import pytest

import vescale_ckpt as vc
from tests.distributed.launch import launch
from tests.train.pipe.models import MODELS
from tests.train.pipe.resume_world import uninterrupted

WORLD = str(Path(__file__).with_name("resume_world.py"))


@pytest.mark.distributed
def test_stages_go_on_as_other_stages(tmp_path):
    curve = uninterrupted()
    for world, kind, chunks in ((4, "1f1b", 1), (2, "zbv", 2)):
        for losses in launch(
            f"{WORLD}:save", world, deadline_seconds=60, folder=str(tmp_path), kind=kind, chunks=chunks
        ):
            assert losses == curve[:2]
    store = vc.open_store(tmp_path / "store")
    runs = ["1f1b-1-4", "zbv-2-2"]
    names = [{name for name in store[f"{run}@2"].tensors() if name.startswith("model.")} for run in runs]
    assert (
        names[0]
        == names[1]
        == {f"model.{name}" for name, _ in MODELS["tied"]()[0].named_parameters()} | {"model.head.weight"}
    )
    for world, kind, chunks in ((2, "interleaved_1f1b", 4), (1, "gpipe", 1)):
        options = {"folder": str(tmp_path), "runs": runs, "kind": kind, "chunks": chunks}
        for found in launch(f"{WORLD}:resume", world, deadline_seconds=60, **options):
            assert found == [curve[2:], curve[2:]]
