from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vescale_train.errors import ConfigError
from vescale_train.optim import clip_grad_norm


def model_with(*gradients):
    model = nn.ParameterList([nn.Parameter(torch.zeros_like(g)) if g is not None else None for g in gradients])
    for parameter, gradient in zip(model, gradients, strict=True):
        if parameter is not None:
            parameter.grad = gradient
    return model


@pytest.mark.parametrize("exact", [False, True])
def test_one_rank_clips_as_torch_does(exact):
    torch.manual_seed(0)
    gradients = [torch.randn(5, 3), torch.randn(7), torch.zeros(0), torch.randn(())]
    model, plain = model_with(*(g.clone() for g in gradients)), model_with(*gradients)
    norm = clip_grad_norm(model, 0.7, exact=exact)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.7)
    assert torch.allclose(norm, expected)
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(model, plain, strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_what_has_no_gradient_counts_nothing(exact):
    model = model_with(torch.tensor([3.0]), torch.tensor([4.0]))
    model.append(nn.Parameter(torch.ones(2)))
    assert clip_grad_norm(model, math.inf, exact=exact) == 5
    assert clip_grad_norm(nn.ParameterList(), 1.0, exact=exact) == 0


def test_the_stages_of_one_rank_are_one_model():
    stages = [model_with(torch.tensor([3.0])), nn.ModuleDict({"b": model_with(torch.tensor([4.0]))})]
    assert clip_grad_norm(stages, math.inf) == 5


def test_an_infinite_limit_touches_nothing():
    model = model_with(torch.tensor([math.inf, 1.0]))
    assert math.isinf(clip_grad_norm(model, math.inf))
    assert model[0].grad[1] == 1


@pytest.mark.parametrize(
    "wrong",
    [{"norm_type": 0.0}, {"max_norm": -1.0}, {"norm_type": 1.0, "exact": True}],
    ids=["power", "limit", "exact"],
)
def test_impossible_norms_are_refused(wrong):
    with pytest.raises(ConfigError, match="cannot clip"):
        clip_grad_norm(model_with(torch.ones(1)), **{"max_norm": 1.0, **wrong})


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["norms", "stages"])
def test_every_element_counts_once_over_all_meshes(more_world, what):
    assert all(rank[what] and all(rank[what].values()) for rank in more_world), more_world[0][what]
