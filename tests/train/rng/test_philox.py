from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.rng.philox import WORDS_PER_BLOCK, device_words, host_words

KEYS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))


def stream(key, count):
    """Return the first words of numpy's own stream."""
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64))
    return generator.random_raw(-(-count // 2)).view(np.uint32)[:count]


def test_known_answer():
    """Counter and key 0, from the authors of Philox; the block of index 0 has counter 1, so this one is before it."""
    words = device_words((0, 0), torch.tensor([-1]))[0].tolist()
    answer = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert [words[i] | words[i + 1] << 32 for i in range(0, 8, 2)] == answer


@given(KEYS, st.integers(0, 200), st.integers(0, 70))
def test_any_part_is_that_of_numpys_stream(key, start, count):
    assert np.array_equal(host_words(key, start, count), stream(key, start + count)[start:])


@given(KEYS, st.integers(0, 2**40))
def test_far_parts_are_numpys_advanced(key, block):
    generator = np.random.Philox(key=np.array(key, dtype=np.uint64))
    generator.advance(block)
    assert np.array_equal(host_words(key, 8 * block, 24), generator.random_raw(12).view(np.uint32))


@given(KEYS, st.lists(st.integers(0, 2**60), min_size=1, max_size=5))
def test_torch_operations_give_the_same_words(key, blocks):
    made = device_words(key, torch.tensor(blocks))
    assert made.shape == (len(blocks), WORDS_PER_BLOCK)
    for block, words in zip(blocks, made.tolist(), strict=True):
        assert words == host_words(key, WORDS_PER_BLOCK * block, WORDS_PER_BLOCK).tolist()
