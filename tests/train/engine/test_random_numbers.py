import pytest
import torch
from torch import nn
from torch.optim import SGD

from vescale_train.engine import optimizer, parallelize, progress_of, step
from vescale_train.engine.random_numbers import micro_batch_numbers, random_numbers
from vescale_train.rng import active, single_device_rng


@pytest.fixture
def noisy(mesh):
    def make(*, exact):
        torch.manual_seed(0)
        return parallelize(nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)), mesh, exact=exact, seed=3)

    return make


def losses(model, batch, loss_fn, micro_batches):
    optim = optimizer(model, SGD, lr=0.0)
    return [step(model, optim, batch, loss_fn=loss_fn, micro_batches=micro_batches).item() for _ in range(3)]


def test_in_exact_mode_torch_s_generator_has_no_say_and_each_step_draws_anew(noisy, batch, loss_fn):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(losses(noisy(exact=True), batch, loss_fn, 2))
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_a_sample_draws_the_same_in_whatever_micro_batch_it_is(noisy, batch, loss_fn):
    one, other = (losses(noisy(exact=True), batch, loss_fn, number) for number in (1, 8))
    assert one == pytest.approx(other, rel=1e-6)


def test_numbers_that_are_switched_on_are_taken(noisy, batch, loss_fn):
    model = noisy(exact=False)
    with single_device_rng(3, model):
        found = losses(model, batch, loss_fn, 2)
    assert found == losses(noisy(exact=True), batch, loss_fn, 2)


def test_else_torch_draws(noisy, batch):
    with random_numbers(noisy(exact=False)) as rng:
        assert rng is None
        with micro_batch_numbers(rng, batch, (0, 1)):
            assert active() is None


def test_the_step_is_the_key(noisy):
    model = noisy(exact=True)
    progress_of(model).step = 5
    with random_numbers(model) as rng:
        assert rng.step == 5
        assert active() is rng
    assert active() is None
