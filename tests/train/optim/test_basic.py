from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_train.ddp import DistributedDataParallel
from vescale_train.errors import ConfigError
from vescale_train.optim import BasicOptimizer, DistributedOptimizer


def net():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def wrapped(**options):
    ddp = DistributedDataParallel(net())
    return ddp, BasicOptimizer(torch.optim.AdamW(ddp.module.parameters(), lr=0.1), ddp, **options)


def test_steps_clips_and_zeroes_as_a_plain_optimizer():
    model, plain = (model := net()), torch.optim.AdamW(model.parameters(), lr=0.1)
    ddp, basic = wrapped(clip_grad=0.1)
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        model(x).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        loss = basic.step(lambda x=x: closure(ddp, x))
        basic.zero_grad()
        assert loss is not None
        assert torch.allclose(basic.grad_norm, norm)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), ddp.module.parameters(), strict=True)
    )


def closure(model, x):
    loss = model(x).sum()
    loss.backward()
    return float(loss.detach())


def test_groups_and_state_are_the_plain_ones_and_schedulers_see_them():
    ddp, basic = wrapped()
    assert basic.param_groups is basic.optimizer.param_groups
    assert basic.state is basic.optimizer.state
    scheduler = torch.optim.lr_scheduler.StepLR(basic, 1, 0.5)
    closure(ddp, torch.ones(1, 3))
    basic.step()
    scheduler.step()
    assert basic.optimizer.param_groups[0]["lr"] == 0.05
    saved = basic.state_dict()
    _, other = wrapped()
    other.load_state_dict(saved)
    assert other.param_groups is other.optimizer.param_groups
    assert len(other.state) == 2
    other.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(other.optimizer.param_groups) == 2


def test_a_model_that_keeps_shares_of_gradients_is_refused():
    ddp = DistributedDataParallel(net(), use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match="needs a DistributedOptimizer"):
        BasicOptimizer(torch.optim.SGD(ddp.module.parameters()), ddp)
    DistributedOptimizer(torch.optim.SGD(ddp.module.parameters()), ddp)
