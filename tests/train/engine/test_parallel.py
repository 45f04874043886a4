import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from vescale_train.dmodule import attached
from vescale_train.engine import optimizer, parallelize
from vescale_train.errors import ConfigError, StateError
from vescale_train.optim import BasicOptimizer, DistributedOptimizer
from vescale_train.pipe import PipelineParallelPlan


def test_one_rank_needs_no_plan(mesh):
    layer = nn.Linear(2, 2)
    assert parallelize(layer, mesh, exact=True, seed=4) is layer
    assert type(layer.weight) is nn.Parameter
    assert (attached(layer).exact, attached(layer).seed, attached(layer).mesh) == (True, 4, mesh)


@pytest.mark.parametrize(
    ("zero", "kind", "gradients"),
    [(None, BasicOptimizer, False), (0, BasicOptimizer, False), (1, DistributedOptimizer, False),
     (2, DistributedOptimizer, True)],
)  # fmt: skip
def test_the_stage_of_zero_can_be_chosen(model, zero, kind, gradients):
    made = optimizer(model, AdamW, zero=zero, lr=0.5, clip_grad=2.0)
    assert type(made) is kind
    assert made.clip_grad == 2.0
    assert made.param_groups[0]["lr"] == 0.5
    assert made.models[0].options.shard_gradients is gradients


def test_groups_are_taken(model):
    groups = [{"params": [model[0].weight], "lr": 0.25}, {"params": [model[0].bias]}]
    made = optimizer(model, SGD, parameters=groups, lr=1.0)
    assert [group["lr"] for group in made.param_groups] == [0.25, 1.0]


def test_what_cannot_be_is_refused(model):
    with pytest.raises(ConfigError, match="zero=4"):
        optimizer(model, AdamW, zero=4)
    with pytest.raises(ConfigError, match="no axis 'pp'"):
        parallelize(nn.Linear(1, 1), attached(model).mesh, pipeline=PipelineParallelPlan(num_microbatches=2))
    with pytest.raises(StateError, match="parallelize"):
        optimizer(nn.Linear(1, 1), AdamW)


def test_exact_mode_goes_on_into_the_optimizer(mesh):
    made = optimizer(parallelize(nn.Linear(2, 2), mesh, exact=True), AdamW)
    assert made.models[0].options.exact
    assert isinstance(made.models[0].module.weight, torch.Tensor)
