import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from vescale_train.engine import optimizer, progress_of, step
from vescale_train.errors import ConfigError, InvalidInputError, StateError
from vescale_train.timeline import close_ndtimers, flush, init_ndtimers


def twin(model):
    """Return the same model as plain torch knows it."""
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    return other


def plain_step(model, optim, batch, loss_fn, micro_batches, clip):
    """What a person would write for one device."""
    optim.zero_grad()
    total = 0.0
    for x, y in zip(*(part.chunk(micro_batches) for part in batch), strict=True):
        loss = loss_fn(model(x), y) / micro_batches
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optim.step()
    return total, norm


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_is_what_a_person_would_write(model, batch, loss_fn, micro_batches, zero):
    other = twin(model)
    plain = AdamW(other.parameters(), lr=0.1)
    optim = optimizer(model, AdamW, lr=0.1, clip_grad=0.3, zero=zero)
    for number in range(1, 4):
        want, norm = plain_step(other, plain, batch, loss_fn, micro_batches, 0.3)
        loss = step(model, optim, batch, loss_fn=loss_fn, micro_batches=micro_batches)
        assert loss.item() == pytest.approx(want, rel=1e-6)
        assert optim.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        assert progress_of(model).step == number
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_any_optimizer_will_do_on_one_rank(model, batch, loss_fn):
    other = twin(model)
    plain_step(other, SGD(other.parameters(), lr=0.1), batch, loss_fn, 4, 0.01)
    step(model, SGD(model.parameters(), lr=0.1), batch, loss_fn=loss_fn, micro_batches=4, clip_grad=0.01)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_clip_of_the_step_goes_before_that_of_the_optimizer(model, batch, loss_fn):
    optim = optimizer(model, SGD, lr=0.0, clip_grad=9.0)
    step(model, optim, batch, loss_fn=loss_fn, clip_grad=1e-3)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)


def test_a_scheduler_steps_after_the_optimizer(model, batch, loss_fn):
    optim = optimizer(model, SGD, lr=1.0)
    schedule = LambdaLR(optim, lambda number: 0.5**number)
    rates = []
    for _ in range(3):
        rates.append(optim.param_groups[0]["lr"])
        step(model, optim, batch, loss_fn=loss_fn, scheduler=schedule)
    assert rates == [1.0, 0.5, 0.25]


def test_batches_that_cannot_be_cut_are_refused_and_count_no_step(model, batch, loss_fn):
    optim = optimizer(model, SGD, lr=1.0)
    for micro_batches in (0, -2, 3):
        with pytest.raises(ConfigError):
            step(model, optim, batch, loss_fn=loss_fn, micro_batches=micro_batches)
    with pytest.raises(InvalidInputError, match="pass loss_fn"):
        step(model, optim, batch[0])
    assert progress_of(model).step == 0
    step(model, optim, batch, loss_fn=loss_fn)
    assert progress_of(model).step == 1


def test_a_model_that_was_not_parallelized_is_refused(batch, loss_fn):
    layer = torch.nn.Linear(3, 1)
    with pytest.raises(StateError, match=r"call vescale_train\.parallelize"):
        step(layer, SGD(layer.parameters(), lr=0.1), batch, loss_fn=loss_fn)


def test_a_step_after_one_that_failed_is_as_if_it_had_not_been(model, batch, loss_fn):
    other = twin(model)
    optim = optimizer(model, SGD, lr=0.1)

    def fails_late(output, target, calls=[]):  # noqa: B006 - counts its calls
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("target")
        return loss_fn(output, target)

    with pytest.raises(KeyError):
        step(model, optim, batch, loss_fn=fails_late, micro_batches=2)
    step(model, optim, batch, loss_fn=loss_fn)
    plain_step(other, SGD(other.parameters(), lr=0.1), batch, loss_fn, 1, 1e9)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_parts_of_a_step_are_timed(model, batch, loss_fn):
    init_ndtimers()
    try:
        optim = optimizer(model, SGD, lr=0.1)
        for _ in range(2):
            step(model, optim, batch, loss_fn=loss_fn, micro_batches=2)
        names = [(span.step, span.name) for span in flush()]
    finally:
        close_ndtimers()
    one = ["forward", "backward", "forward", "backward", "reduce gradients", "reduce loss", "optimizer"]
    assert names == [(number, name) for number in (0, 1) for name in one]
