"""The same script with pipeline stages, with replicas of them, and on from and to meshes without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed.launch import launch
from vescale_train.engine import parallelize
from vescale_train.engine.stages import average_gradients
from vescale_train.errors import ConfigError


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder, found = str(tmp_path_factory.mktemp("stages")), {}
    for num_ranks in (1, 4):
        by_rank = launch("../train/engine/stages_world.py:train_all", num_ranks, deadline_seconds=200, folder=folder)
        assert all(other == by_rank[0] for other in by_rank)
        found |= by_rank[0]
    return found


@pytest.mark.distributed
def test_stages_train_as_one_device_does(results):
    one = results["one"]
    for name in ("dp1f1b", "dpzbv"):
        assert results[name]["losses"] == pytest.approx(one["losses"], rel=1e-5), name
        assert results[name]["norm"] == pytest.approx(one["norm"], rel=1e-4), "over all stages, tied weights once"
        assert results[name]["evaluated"] == pytest.approx(one["evaluated"], rel=1e-5), name
    assert one["norm"] > 0.5


@pytest.mark.distributed
def test_on_from_a_mesh_without_stages_to_stages_and_back(results):
    resumed = [name for name in results if " from " in name]
    assert len(resumed) == 3
    for name in resumed:
        assert results[name]["losses"] == pytest.approx(results["one"]["losses"][2:], rel=1e-5), name


def test_exact_mode_over_stages_is_refused(monkeypatch, mesh):
    monkeypatch.setattr("vescale_train.engine.parallel.size", lambda *_: 2)
    with pytest.raises(ConfigError, match="exact mode does not reach over 2 pipeline stages"):
        parallelize(nn.Linear(1, 1), mesh, exact=True)


def test_one_rank_keeps_its_gradients(mesh):
    parameter = nn.Parameter(torch.ones(2))
    average_gradients([parameter], mesh)
    assert parameter.grad is None
