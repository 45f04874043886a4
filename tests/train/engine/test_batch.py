from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vescale_train.engine.batch import inputs_and_target, loss_of, num_samples, split
from vescale_train.errors import ConfigError, InvalidInputError

BATCH = {"x": torch.arange(12).reshape(6, 2), "more": [torch.arange(6), torch.tensor(5)], "name": "a"}


def test_samples_are_counted_by_dim_0():
    assert num_samples(BATCH) == 6
    assert num_samples(torch.zeros(3, 4)) == 3


@pytest.mark.parametrize(
    ("batch", "words"),
    [((torch.zeros(3), torch.zeros(4)), r"sizes \[3, 4\]"), ({"a": 1, "b": torch.tensor(2)}, "no tensor with a dim")],
)
def test_a_batch_without_one_size_is_refused(batch, words):
    with pytest.raises(InvalidInputError, match=words):
        num_samples(batch)


@given(st.integers(1, 6), st.integers(1, 4))
def test_parts_are_equal_and_in_order(num_parts, each):
    batch = {"x": torch.arange(num_parts * each), "whole": torch.tensor(7), "text": "t"}
    parts = split(batch, num_parts)
    assert [num_samples(part) for part in parts] == [each] * num_parts
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert all(part["whole"] is batch["whole"] and part["text"] == "t" for part in parts)


def test_unequal_parts_are_refused():
    with pytest.raises(ConfigError, match="cut 6 samples of this rank into 4 equal micro-batches"):
        split(BATCH, 4)


def loss(output, target):
    return output


def test_what_a_model_is_given_follows_from_the_kind_of_batch():
    assert inputs_and_target({"x": 1}, loss) == ((), {"x": 1}, {"x": 1})
    assert inputs_and_target((1, 2), loss) == ((1,), {}, 2)
    assert inputs_and_target((1, 2), None) == ((1, 2), {}, (1, 2))
    assert inputs_and_target([1, 2, 3], loss) == ((1, 2, 3), {}, [1, 2, 3])
    assert inputs_and_target("x", loss) == (("x",), {}, "x")


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, *_, **__):
        return self.result


NUMBER = torch.tensor(3.0)


@pytest.mark.parametrize(
    "result", [NUMBER, NUMBER.reshape(1), {"loss": NUMBER}, (NUMBER, "logits"), SimpleNamespace(loss=NUMBER)]
)
def test_a_model_s_own_loss_is_found(result):
    assert loss_of(Returns(result), {"x": 1}, None).item() == 3.0


@pytest.mark.parametrize("result", [torch.ones(2), {"logits": NUMBER}, (), None, SimpleNamespace(loss=None), 3.0])
def test_no_loss_is_refused_with_what_was_found(result):
    with pytest.raises(InvalidInputError, match=r"the loss of Returns is .* pass loss_fn"):
        loss_of(Returns(result), {"x": 1}, None)


def test_a_loss_function_gets_output_and_target():
    given_to = []
    assert loss_of(Returns("out"), (1, 2), lambda *args: given_to.append(args) or NUMBER) is NUMBER
    assert given_to == [("out", 2)]
