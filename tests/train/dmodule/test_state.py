"""Parallel models in checkpoints, over meshes, and inside FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import launch

WORLD = str(Path(__file__).with_name("state_world.py"))
FAR = 1e-6


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch(f"{WORLD}:main", 4, deadline_seconds=180, folder=str(tmp_path_factory.mktemp("saved")))


@pytest.mark.distributed
def test_what_one_mesh_saved_another_loads_to_the_bit_and_goes_on(found):
    for rank in found:
        for mode in ("fast", "exact"):
            for name, runs in rank[mode].items():
                wanted = runs.pop("undisturbed")
                assert set(runs) == {"tp 4", "dp 2 x tp 2", "dp 4"}
                for mesh, (same, *losses) in runs.items():
                    assert same, (name, mesh)
                    assert losses == (wanted if mode == "exact" else pytest.approx(wanted, rel=FAR)), (name, mesh)


@pytest.mark.distributed
def test_fsdp2_around_a_parallel_model_gives_what_one_device_gives(found):
    for rank in found:
        for name, result in rank["sharded"].items():
            assert result["loss"] <= FAR, name
            assert result["gradient"] <= FAR, name
