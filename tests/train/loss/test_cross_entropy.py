"""On one process: torch's values and gradients, for every option."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from vescale_train.errors import InvalidInputError
from vescale_train.loss import cross_entropy, parallel_loss

SHAPES = [((7, 5), (7,)), ((3, 5, 4), (3, 4)), ((5,), ()), ((2, 5, 2, 3), (2, 2, 3))]
OPTIONS = list(itertools.product(["mean", "sum", "none"], [0.0, 0.1, 1.0], [False, True], [False, True]))


def case(shape, target_shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(shape, generator=generator, dtype=dtype) * 3
    target = torch.randint(0, 5, target_shape, generator=generator)
    return logits, target, torch.rand(5, generator=generator, dtype=dtype) + 0.1


@pytest.mark.parametrize(("reduction", "smoothing", "weighted", "ignoring"), OPTIONS)
@pytest.mark.parametrize(("shape", "target_shape"), SHAPES)
@pytest.mark.parametrize("exact", [False, True])
def test_values_and_gradients_are_torchs(shape, target_shape, reduction, smoothing, weighted, ignoring, exact):
    logits, target, weight = case(shape, target_shape)
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": 3 if ignoring else -100}
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    want = functional.cross_entropy(a, target, weight if weighted else None, **options)
    got = cross_entropy(b, target, weight if weighted else None, exact=exact, **options)
    torch.testing.assert_close(got, want, equal_nan=True)
    factor = torch.arange(1.0, want.numel() + 1, dtype=want.dtype).view(want.shape)
    (want * factor).sum().backward()
    (got * factor).sum().backward()
    torch.testing.assert_close(b.grad, a.grad, equal_nan=True)


def test_the_gradient_is_that_of_differences():
    logits, target, weight = case((4, 5), (4,))
    target[1] = -100

    def loss(x):
        return cross_entropy(x, target, weight, label_smoothing=0.2)

    assert torch.autograd.gradcheck(loss, logits.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_that_of_the_logits(dtype):
    logits, target, weight = case((50, 5), (50,), dtype)
    got = cross_entropy(logits.requires_grad_(), target, weight)
    assert got.dtype == dtype
    got.backward()
    assert logits.grad.dtype == dtype
    torch.testing.assert_close(got, functional.cross_entropy(logits, target, weight))


def test_logits_without_bounds_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [-3e38, 3e38, 0.0]], requires_grad=True)
    cross_entropy(logits, torch.tensor([0, 1])).backward()
    assert logits.grad.abs().max() == 0


def test_nothing_to_count_is_not_a_number_as_in_torch():
    logits, _, _ = case((3, 5), (3,))
    assert cross_entropy(logits, torch.full((3,), -100)).isnan()
    assert cross_entropy(logits, torch.full((3,), -100), reduction="sum") == 0


def test_plain_tensors_in_the_block_go_to_torch():
    logits, target, _ = case((7, 5), (7,))
    with parallel_loss():
        assert torch.equal(functional.cross_entropy(logits, target), functional.cross_entropy(logits, target))


def test_what_is_impossible_is_refused():
    logits, target, _ = case((7, 5), (7,))
    with pytest.raises(InvalidInputError, match="not probabilities"):
        cross_entropy(logits, logits.softmax(1))
    with pytest.raises(InvalidInputError, match="not 'average'"):
        cross_entropy(logits, target, reduction="average")
    with pytest.raises(InvalidInputError, match="in \\[0, 1\\]"):
        cross_entropy(logits, target, label_smoothing=2.0)
