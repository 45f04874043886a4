from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_train.ddp import DDPOptions
from vescale_train.errors import ConfigError
from vescale_train.optim import BasicOptimizer, DistributedOptimizer, MuonByOwner, optimizer


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).to(dtype)


def test_one_rank_takes_a_plain_optimizer_unless_parameters_need_masters():
    assert isinstance(optimizer(net(), torch.optim.SGD, lr=0.5), BasicOptimizer)
    assert isinstance(optimizer(net(torch.bfloat16)), DistributedOptimizer)
    assert isinstance(optimizer(net(), zero=2), DistributedOptimizer)
    model = net()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    assert isinstance(optimizer(model, torch.optim.Muon, parameters=matrices), MuonByOwner)


def test_options_go_where_they_belong():
    made = optimizer(
        net(),
        zero=1,
        lr=0.5,
        betas=(0.8, 0.9),
        clip_grad=2.0,
        bucket_size=16,
        overlap_grad_reduce=False,
        ddp=DDPOptions(mean_over="nothing"),
    )
    assert made.param_groups[0]["lr"] == 0.5
    assert made.param_groups[0]["betas"] == (0.8, 0.9)
    assert made.clip_grad == 2.0
    assert made.models[0].mean_over == "nothing"
    assert len(made.models[0].buckets) == 4


def test_groups_may_be_given():
    model = net()
    groups = [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[1].weight]}]
    made = optimizer(model, torch.optim.SGD, parameters=groups, lr=0.2)
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.2]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="the stages of ZeRO are 0 to 3"):
        optimizer(net(), zero=4)
    with pytest.raises(ConfigError, match="ZeRO-1 with Adafactor, which needs whole parameters"):
        optimizer(net(), torch.optim.Adafactor, zero=1)
    with pytest.raises(ConfigError, match="ZeRO-3 needs a mesh"):
        optimizer(net(), zero=3)


@pytest.mark.distributed
def test_four_data_parallel_ranks_take_zero_by_themselves(more_world):
    found = [rank["chosen"] for rank in more_world]
    assert all(len(rank) == 6 and all(rank.values()) for rank in found), found[0]
