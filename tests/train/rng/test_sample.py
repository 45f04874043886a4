from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.rng import sample
from vescale_train.rng.philox import host_words

WORDS = torch.from_numpy(host_words((1, 2), 0, 200_000).astype(np.int64))
EDGES = torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1])


def test_uniform_numbers_have_the_digits_asked_for_and_never_reach_one():
    for digits in (8, 11, 24, 32):
        made = sample.uniform(torch.cat([WORDS, EDGES]), digits)
        assert made.min() >= 0
        assert made.max() == 1 - 2.0**-digits
        assert torch.equal(made * 2.0**digits, (made * 2.0**digits).round())


def test_fewer_digits_are_the_same_number_cut():
    wide, narrow = sample.uniform(WORDS, 32), sample.uniform(WORDS, 8)
    assert torch.equal((wide * 256).floor() / 256, narrow)


def test_the_quantile_is_that_of_the_standard_library():
    words = torch.cat([WORDS[:3000], EDGES])
    want = [NormalDist().inv_cdf((w + 0.5) / 2**32) for w in words.tolist()]
    assert (sample.normal(words) - torch.tensor(want, dtype=torch.float64)).abs().max() < 1e-14


def test_normal_numbers_are_symmetric_to_the_bit():
    assert torch.equal(sample.normal(WORDS), -sample.normal(2**32 - 1 - WORDS))


def test_moments():
    normal, exponential = sample.normal(WORDS), sample.exponential(WORDS)
    error = 5 / math.sqrt(len(WORDS))
    assert abs(normal.mean()) < error
    assert abs(normal.std() - 1) < error
    assert abs((normal**4).mean() - 3) < 12 * error
    assert abs(exponential.mean() - 1) < error
    assert exponential.min() > 0
    assert abs(sample.uniform(WORDS, 24).mean() - 0.5) < error
    assert abs(sample.bernoulli(WORDS, 0.3).double().mean() - 0.3) < error


def test_a_certain_and_an_impossible_event():
    assert sample.bernoulli(EDGES, 1.0).all()
    assert not sample.bernoulli(EDGES, 0.0).any()


@given(st.floats(1e-300, 1e300))
def test_logarithm(x):
    made = sample.log(torch.tensor([x], dtype=torch.float64)).item()
    assert made == pytest.approx(math.log(x), rel=4e-16, abs=4e-17)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_a_number_depends_on_its_own_words_only(start, count):
    part = WORDS[start : start + count].clone()
    for make in (sample.normal, sample.exponential, lambda w: sample.truncated_normal(w, -1.0, 2.0)):
        assert torch.equal(make(WORDS[:2000])[start : start + count], make(part))


@given(st.integers(1, 2**63 - 1), st.integers(-(2**31), 2**31))
def test_integers_are_within_their_bounds(count, low):
    low = min(low, 2**63 - 1 - count)
    made = sample.integers(WORDS[:200].view(-1, 2).clone(), low, count)
    assert made.min() >= low
    assert made.max() < low + count


def test_all_integers_come_up_equally_often():
    counts = torch.bincount(sample.integers(WORDS.view(-1, 2), 0, 7))
    assert len(counts) == 7
    assert (counts - 100_000 / 7).abs().max() < 5 * math.sqrt(100_000 / 7)


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (0.5, 0.6), (1.0, 9.0), (-9.0, -4.0), (-0.01, 30.0)])
def test_truncated_normal_numbers_are_within_their_bounds_and_have_their_distribution(low, high):
    made = sample.truncated_normal(WORDS[:20_000], low, high)
    assert made.min() >= low
    assert made.max() <= high
    cdf = NormalDist().cdf
    middle = NormalDist().inv_cdf((cdf(low) + cdf(high)) / 2)
    assert abs((made < middle).double().mean() - 0.5) < 0.02
