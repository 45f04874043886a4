"""A shuffled order as a function: the n-th of an epoch's samples, without a list of all of them and without state.

A Feistel network is a permutation of the numbers of an even number of bits whatever its round function is; numbers that
fall outside of the data set are sent through it again until they fall inside (cycle walking), which keeps it one. The
orders are part of what a checkpoint means: they must never change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[np.uint64]

_ROUNDS = 6
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: keys that are neighbours become far apart


def permute(positions: NDArray[np.int64], size: int, *, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return what stands at these positions of an epoch's order of the numbers 0 to ``size - 1``.

    Args:
        positions: int64[n], each at least 0 and below ``size``.
        size: how many numbers are put in order.
        seed: any int of 64 bits.
        epoch: orders of different epochs have nothing to do with each other.

    Raises:
        InvalidInputError: a position is out of bounds.
    """
    if positions.size and (positions.min() < 0 or positions.max() >= size):
        raise InvalidInputError(
            f"cannot look up positions {positions.min()} to {positions.max()} of an order of {size} samples"
        )
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(_mixed_int(seed, epoch, number)) for number in range(_ROUNDS)]
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():  # the domain is less than 4 x size: 4 passes on average at most
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: Words, half_bits: int, keys: list[np.uint64]) -> Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(words: Words) -> Words:
    """Return words whose every bit depends on every bit of the input (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def _mixed_int(*parts: int) -> int:
    """Return 64 bits that depend on all of several ints."""
    state = 0
    for part in parts:
        word = (state + part + _GOLDEN) & _WORD
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
        state = word ^ word >> 31
    return state
