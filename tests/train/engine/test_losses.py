import pytest
import torch

from vescale_train.comm import tree_sum
from vescale_train.engine.losses import mean_loss, plain
from vescale_train.errors import InvalidInputError


def test_a_loss_is_shown_as_a_plain_number():
    loss = torch.ones(1, requires_grad=True, dtype=torch.float64) * 2
    assert plain(loss).shape == ()
    assert not plain(loss).requires_grad
    assert plain(loss).dtype == torch.float32


@pytest.mark.parametrize("exact", [False, True])
def test_the_mean_is_over_all_micro_batches_and_leaves_them_as_they_are(exact):
    losses = [torch.tensor(float(number)) for number in (1, 2, 6)]
    assert mean_loss(losses, None, exact=exact).item() == 3.0
    assert [loss.item() for loss in losses] == [1, 2, 6]


def test_exact_mode_sums_in_the_fixed_tree():
    losses = list(torch.randn(7, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(mean_loss(losses, None, exact=True), tree_sum(losses) / 7)


def test_losses_of_many_batches_go_together():
    losses = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    assert mean_loss(losses, None, exact=True).tolist() == mean_loss(losses, None, exact=False).tolist() == [2.0, 4.0]


def test_no_loss_has_no_mean():
    with pytest.raises(InvalidInputError, match="no micro-batch"):
        mean_loss([], None, exact=False)
