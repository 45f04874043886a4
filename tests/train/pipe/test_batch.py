from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from tests.train import models as hub
from vescale_train.pipe import Batch, BatchError
from vescale_train.pipe.batch import as_batch, form_of, split_batch, takes_target

X, Y = torch.arange(6.0), torch.arange(6.0) + 10


def one(output):
    """Take an output."""


def one_and_an_option(output, scale=2):
    """Take an output and what need not be given."""


def two(output, target):
    """Take an output and a target."""


class Takes(nn.Module):
    def forward(self, x, mask=None):
        """Take two named inputs."""


class TakesAll(nn.Module):
    def forward(self, x, **more):
        """Take anything."""


@pytest.mark.parametrize(
    ("loss_fn", "wants"),
    [
        (None, False),
        (one, False),
        (one_and_an_option, False),
        (two, True),
        (nn.MSELoss(), True),
        (F.cross_entropy, True),
        (torch.dot, True),
    ],
)
def test_a_loss_is_asked_what_it_takes(loss_fn, wants):
    assert takes_target(loss_fn) is wants


def test_what_a_minibatch_means():
    model = Takes()
    assert as_batch((X, Y), model, F.mse_loss) == Batch(args=(X,), target=Y)
    assert as_batch(((X, Y), Y), model, F.mse_loss) == Batch(args=(X, Y), target=Y)
    assert as_batch(({"x": X}, Y), model, F.mse_loss) == Batch(kwargs={"x": X}, target=Y)
    assert as_batch((X, Y), model, None) == Batch(args=(X, Y))
    assert as_batch(X, model, None) == Batch(args=(X,))
    given = {"x": X, "label": Y}
    assert as_batch(given, model, None) == Batch(kwargs={"x": X})
    assert as_batch(given, TakesAll(), F.mse_loss) == Batch(kwargs=given, target=given)
    itself = Batch(args=(X,))
    assert as_batch(itself, model, None) is itself
    with pytest.raises(BatchError, match="a minibatch is a pair"):
        as_batch(X, model, F.mse_loss)


def test_models_of_other_people_keep_no_cache():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert as_batch({"input_ids": tokens}, hub.make("gpt2"), None).kwargs == {"input_ids": tokens, "use_cache": False}


@given(st.integers(1, 20), st.integers(1, 20))
def test_micro_batches_cover_all_samples_once_and_their_shares_add_up(num_samples, num_microbatches):
    x = torch.arange(num_samples)
    batch = Batch(args=(x, "constant"), kwargs={"table": torch.zeros(num_samples + 1)}, target=[x])
    if num_samples < num_microbatches:
        with pytest.raises(BatchError, match=f"cannot cut {num_samples} samples into {num_microbatches} micro-batches"):
            split_batch(batch, num_microbatches)
        return
    micros = split_batch(batch, num_microbatches)
    assert torch.equal(torch.cat([micro.args[0] for micro in micros]), x)
    assert all(torch.equal(micro.target[0], micro.args[0]) for micro in micros)
    assert all(micro.args[0].tolist() == list(range(micro.start, micro.start + micro.count)) for micro in micros)
    assert sum((micro.share for micro in micros), Fraction(0)) == 1
    sizes = [micro.count for micro in micros]
    assert max(sizes) - min(sizes) <= 1
    assert all(micro.args[1] == "constant" and len(micro.kwargs["table"]) == num_samples + 1 for micro in micros)


def test_what_is_named_whole_is_not_cut():
    batch = Batch(args=(X,), kwargs={"mask": torch.zeros(6, 6)})
    assert [len(micro.kwargs["mask"]) for micro in split_batch(batch, 3)] == [2, 2, 2]
    assert [len(micro.kwargs["mask"]) for micro in split_batch(batch, 3, ["mask"])] == [6, 6, 6]


def test_a_batch_without_a_tensor_cannot_be_cut():
    with pytest.raises(BatchError, match="no tensor with a first dimension"):
        split_batch(Batch(args=(3, torch.tensor(1.0))), 2)


def test_forms_tell_shapes_types_trees_and_plain_values_apart():
    forms = [form_of(tree) for tree in ((X,), [X], (X, None), (X.double(),), (X[:3],), (X, 3), (X, 4))]
    assert len(set(forms)) == len(forms)
    assert form_of((X,)) == form_of((Y,))
