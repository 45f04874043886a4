import pytest
import torch
from torch import nn

from vescale_train.engine import evaluate, parallelize
from vescale_train.errors import ConfigError, InvalidInputError


@pytest.mark.parametrize("micro_batches", [None, 4])
def test_the_mean_is_over_all_batches(model, batch, loss_fn, micro_batches):
    other = (batch[0] + 1, batch[1])
    want = torch.stack([loss_fn(model(x), y) for x, y in (batch, other)]).mean()
    found = evaluate(model, [batch, other], loss_fn=loss_fn, micro_batches=micro_batches)
    torch.testing.assert_close(found, want.detach())
    assert not found.requires_grad


def test_modules_go_back_to_the_mode_that_each_was_in(mesh, batch, loss_fn):
    model = parallelize(nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5), nn.Linear(50, 1)), mesh)
    model[0].eval()
    found = {evaluate(model, [batch], loss_fn=loss_fn).item() for _ in range(3)}
    assert len(found) == 1, "dropout is off"
    assert [module.training for module in model] == [False, True, True]
    with pytest.raises(KeyError):
        evaluate(model, [batch], loss_fn=lambda *_: {}["loss"])
    assert [module.training for module in model] == [False, True, True]


def test_no_batch_and_parts_that_are_not_equal_are_refused(model, batch, loss_fn):
    with pytest.raises(InvalidInputError, match="Sequential on no batch"):
        evaluate(model, [], loss_fn=loss_fn)
    with pytest.raises(ConfigError, match="into 3 equal"):
        evaluate(model, [batch], loss_fn=loss_fn, micro_batches=3)
