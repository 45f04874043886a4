"""Data parallelism on one rank; what needs several is in ``world.py``, which the tests at the end start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.distributed.launch import launch
from vescale_train.ddp import DDPOptions, DistributedDataParallel
from vescale_train.errors import ConfigError, StateError

WORLD = str(Path(__file__).with_name("world.py"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 5)
        self.down = nn.Linear(5, 3)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())
        self.again = self.up
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.again(self.down(self.up(x)))


def loss(model, seed=0):
    return model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).pow(2).mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def test_gradients_are_those_of_plain_backward_and_none_where_nothing_came():
    plain, model = Net(), Net()
    ddp = DistributedDataParallel(model, bucket_size=1)
    for seed in (0, 1, 2):
        loss(plain, seed).backward()
        with ddp.no_sync():
            loss(ddp, seed).backward()
    assert all(grad is None for grad in gradients(model).values())
    ddp.finish_grad_sync()
    expected = gradients(plain)
    assert expected["unused"] is expected["frozen"] is None
    for name, grad in gradients(model).items():
        assert grad is expected[name] is None or torch.equal(grad, expected[name]), name
    assert len(ddp.buckets) == 5  # the tied layer counts once, the frozen parameter not at all


def test_zeroing_starts_anew():
    model = Net()
    ddp = DistributedDataParallel(model)
    loss(ddp, 5).backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    assert all(p.grad is None for p in model.parameters())
    loss(ddp, 0).backward()
    ddp.finish_grad_sync()
    plain = Net()
    loss(plain, 0).backward()
    assert torch.equal(model.up.weight.grad, plain.up.weight.grad)
    ddp.zero_grad()
    assert model.up.weight.grad is None


def test_exact_mode_takes_the_mean_over_passes_in_the_fixed_tree():
    model = Net()
    ddp = DistributedDataParallel(model, options=DDPOptions(exact=True))
    units = []
    for seed in range(5):
        plain = Net()
        loss(plain, seed).backward()
        units.append(plain.up.weight.grad)
        loss(ddp, seed).backward()
    ddp.finish_grad_sync()
    a, b, c, d, e = units
    assert torch.equal(model.up.weight.grad, (((a + b) + (c + d)) + e) / 5)


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_bfloat16_are_added_up_in_float32(exact):
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    options = DDPOptions(exact=exact, mean_over="nothing")
    ddp = DistributedDataParallel(model, accumulate_allreduce_grads_in_fp32=True, options=options)
    for value in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        with ddp.no_sync():
            ddp(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    ddp.finish_grad_sync()
    assert ddp.buckets[0].gradient(0).item() == 258
    assert model.weight.grad.item() == 258


def test_a_backward_after_the_reduction_is_refused():
    ddp = DistributedDataParallel(Net())
    loss(ddp).backward()
    with pytest.raises(StateError, match=r"run all backward passes of a step but the last inside no_sync\(\)"):
        loss(ddp).backward()
    ddp.finish_grad_sync()
    with pytest.raises(StateError, match="call zero_grad_buffer"):
        loss(ddp).backward()
    with pytest.raises(StateError, match="reduced already"):
        ddp.start_grad_sync()


def test_after_a_backward_that_failed_zeroing_starts_anew():
    model = Net()
    ddp = DistributedDataParallel(model)

    def fail(_):
        raise RuntimeError("in the middle")

    handle = model.up.bias.register_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        loss(ddp).backward()
    handle.remove()
    ddp.zero_grad_buffer()
    loss(ddp).backward()
    ddp.finish_grad_sync()
    plain = Net()
    loss(plain).backward()
    assert torch.equal(model.up.weight.grad, plain.up.weight.grad)


def test_a_parameter_that_thaws_later_is_refused():
    model = Net()
    ddp = DistributedDataParallel(model)
    model.frozen.requires_grad_(True)
    loss(ddp).backward()
    with pytest.raises(StateError, match=r"1 parameters require a gradient now .*\(frozen\)"):
        ddp.finish_grad_sync()


def test_options_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="shard_gradients needs use_distributed_optimizer"):
        DistributedDataParallel(Net(), options=DDPOptions(shard_gradients=True))
    with pytest.raises(ConfigError, match="exact mode cannot take the mean over ranks"):
        DistributedDataParallel(Net(), options=DDPOptions(exact=True, mean_over="ranks"))
    with pytest.raises(ConfigError, match="none of its parameters requires a gradient"):
        DistributedDataParallel(Net().requires_grad_(False))
    with pytest.raises(ConfigError, match="drop set_to_none"):
        DistributedDataParallel(Net()).zero_grad(set_to_none=False)


def test_a_module_is_wrapped_once_until_it_is_unwrapped():
    model = Net()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ConfigError, match="already; unwrap"):
        DistributedDataParallel(model)
    assert ddp.unwrap() is model
    loss(model).backward()
    assert model.up.weight.grad is not None
    DistributedDataParallel(model)


def test_state_has_the_names_of_the_module():
    model = Net()
    ddp = DistributedDataParallel(model)
    assert list(ddp.state_dict()) == list(model.state_dict())
    other = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    ddp.load_state_dict(other)
    assert not model.up.weight.any()


@pytest.fixture(scope="module")
def world() -> list[dict]:
    """What four ranks say, each for itself."""
    return launch(f"{WORLD}:check", 4, deadline_seconds=120)


@pytest.mark.distributed
def test_a_bucket_is_reduced_before_backward_ends(world):
    """The order that one backward pass recorded, on every rank the same."""
    for rank in world:
        order = rank["overlap"]
        assert order[0] == "bucket 0 started"
        assert order.index("bucket 0 reduced") < order.index("first layer's gradient") < order.index("backward ended")
        started = [event for event in order if event.endswith("started")]
        assert started == [f"bucket {n} started" for n in range(len(started))]
        assert len(started) > 3
    assert all(rank["overlap"] == world[0]["overlap"] for rank in world)


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["mean", "uneven use", "tensor parallel", "exact uneven", "two axes"])
def test_several_ranks(world, what):
    assert all(rank[what] for rank in world)


@pytest.mark.distributed
def test_ranks_that_start_apart_are_refused(world):
    assert all("1 of 4 parameters differ between ranks (1.bias)" in rank["apart"] for rank in world)
