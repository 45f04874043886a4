"""ZeRO over real ranks: the numbers of one device, and state that any other form of the same training takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed.launch import launch
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_train.ddp import DistributedDataParallel
from vescale_train.errors import ConfigError, InvalidInputError, StateError
from vescale_train.optim import DistributedOptimizer

WORLD, RESUME = (str(Path(__file__).with_name(name)) for name in ("zero_world.py", "resume_world.py"))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)).to(dtype)


def wrapped(dtype=torch.float32, cls=torch.optim.AdamW, **options):
    ddp = DistributedDataParallel(net(dtype), use_distributed_optimizer=True)
    return ddp, DistributedOptimizer(cls(ddp.module.parameters(), **options), ddp)


def one_step(model, optimizer, seed=0):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    optimizer.step(lambda: backward(model, x))
    optimizer.zero_grad()


def backward(model, x):
    loss = model(x).float().pow(2).mean()
    loss.backward()
    return float(loss.detach())


def test_one_rank_steps_as_the_plain_optimizer_and_takes_its_options_from_the_groups():
    model = net()
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    ddp, zero = wrapped(lr=0.1)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (plain, zero)]
    for seed in range(3):
        one_step(model, plain, seed)
        one_step(ddp, zero, seed)
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ddp.module.parameters(), strict=True))
    assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.0125


def test_state_is_by_the_models_own_parameters():
    ddp, zero = wrapped()
    assert len(zero.state) == 0
    assert zero.state.get(ddp.module[0].weight) is None
    one_step(ddp, zero)
    assert list(map(id, zero.state)) == [id(p) for bucket in ddp.buckets for p in bucket.parameters]
    values = zero.state[ddp.module[0].weight]
    assert isinstance(values["exp_avg"], ShardedView)
    assert values["exp_avg"].global_shape == (5, 3)
    assert values["step"] == 1
    del zero.state[ddp.module[0].weight]
    assert ddp.module[0].weight not in zero.state
    assert len(zero.state) == 3


def test_bfloat16_parameters_move_by_less_than_they_can_show():
    ddp, zero = wrapped(torch.bfloat16, torch.optim.SGD, lr=1e-4)
    weight = ddp.module[0].weight
    before = weight.detach().clone()
    for seed in range(3):
        one_step(ddp, zero, seed)
    master = zero.state[weight]["master"].pieces[0][1]
    assert torch.equal(master.to(torch.bfloat16), weight)
    assert not torch.equal(master, weight.float())
    assert (master - before.float()).abs().max() > 0


def test_what_does_not_fit_is_refused():
    model = net()
    ddp = DistributedDataParallel(model, use_distributed_optimizer=True)
    with pytest.raises(ConfigError, match="cannot shard Adafactor: it needs whole parameters"):
        DistributedOptimizer(torch.optim.Adafactor(model.parameters()), ddp)
    with pytest.raises(ConfigError, match="1 parameters of this SGD are in none of the models"):
        DistributedOptimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(1))]), ddp)
    stepped = torch.optim.AdamW(model.parameters())
    stepped.state[model[0].weight] = {"step": torch.tensor(1.0)}
    with pytest.raises(StateError, match="has state already"):
        DistributedOptimizer(stepped, ddp)
    whole = DistributedDataParallel(net())
    with pytest.raises(ConfigError, match="use_distributed_optimizer=True"):
        DistributedOptimizer(torch.optim.SGD(whole.module.parameters()), whole)
    zero = DistributedOptimizer(torch.optim.SGD(model.parameters()), ddp)
    with pytest.raises(ConfigError, match="a model has a DistributedOptimizer already"):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), ddp)
    with pytest.raises(ConfigError, match="cannot add a group"):
        zero.add_param_group({"params": []})


def test_state_of_other_groups_and_names_is_refused_and_nothing_changes():
    ddp, zero = wrapped()
    one_step(ddp, zero)
    saved = zero.state_dict()
    group = saved["param_groups"][0]
    wrong = [
        ({**saved, "param_groups": [group, group]}, "it has 2 parameter groups"),
        ({**saved, "param_groups": [{**group, "params": group["params"][1:]}]}, "has 3 parameters"),
        ({**saved, "param_groups": [{**group, "params": ["x", *group["params"][1:]]}]}, r"group 0 has \['x'\]"),
        ({**saved, "state": {"x": {}}}, "1 of its parameters are in no group"),
    ]
    for state, message in wrong:
        with pytest.raises(InvalidInputError, match=message):
            zero.load_state_dict(state)
    assert zero.state_dict().keys() == saved.keys()
    assert len(zero.state) == 4


@pytest.fixture(scope="module")
def trained() -> list[dict]:
    """What four ranks say of each number of data-parallel ranks and stage, each rank for itself."""
    return launch(f"{WORLD}:check", 4, deadline_seconds=240)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> list[dict]:
    """What four ranks say of checkpoints, each rank for itself."""
    return launch(f"{RESUME}:resume", 4, deadline_seconds=240, folder=str(tmp_path_factory.mktemp("zero")))


@pytest.mark.distributed
def test_exact_mode_gives_the_bits_of_one_device_for_every_number_of_ranks_and_stage(trained):
    assert all(len(rank["exact"]) == 9 and all(rank["exact"].values()) for rank in trained)


@pytest.mark.distributed
def test_fast_mode_gives_the_numbers_of_one_device(trained):
    assert all(len(rank["fast"]) == 9 and max(rank["fast"].values()) < 1e-6 for rank in trained)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["zero to plain", "plain to zero", "masters", "tensor parallel", "state dict"])
def test_state_resumes_elsewhere_to_the_bit(resumed, what):
    assert all(rank[what] and all(rank[what].values()) for rank in resumed), resumed[0][what]


@pytest.mark.distributed
def test_another_number_of_ranks_goes_on_as_one_device_does(resumed):
    assert all(rank["other ranks"] for rank in resumed)


@pytest.mark.distributed
def test_another_kind_of_optimizer_and_other_groups_are_refused_before_anything_is_touched(resumed):
    for rank in resumed:
        said = rank["refused"]
        assert said["untouched"]
        assert "the target's SGD has momentum, dampening, the snapshot has not" in said["adam into sgd"]
        assert "the target's AdamW has betas, eps, the snapshot has not" in said["sgd into adam"]
        assert "the target has in one group what the snapshot has in groups 0" in said["one group for two"]
