"""Philox4x64-10: random words that are a function of a key and an index, so that a part of a stream costs only itself.

The stream of a key is that of ``numpy.random.Philox(key=key).random_raw()``, each 64-bit number giving two 32-bit
words, low half first. On a CPU numpy makes it; on other devices the same integers are computed with torch operations.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

Key: TypeAlias = tuple[int, int]
"""Two 64-bit halves."""

WORDS_PER_BLOCK = 8
"""32-bit words that one value of the counter gives."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1


class _Local(threading.local):
    """numpy's generator and a state to set it to: setting one costs a fifth of making one."""

    def __init__(self) -> None:
        self.generator = np.random.Philox(key=[0, 0])
        self.state: Any = self.generator.state


_local = _Local()


def host_words(key: Key, start: int, count: int) -> npt.NDArray[np.uint32]:
    """Return words ``start`` to ``start + count`` of a key's stream."""
    block, skipped = divmod(start, WORDS_PER_BLOCK)
    state = _local.state
    state["state"]["counter"][0] = block
    state["state"]["key"][:] = key
    state["buffer_pos"] = 4  # nothing is left of another block
    _local.generator.state = state
    raw = _local.generator.random_raw((skipped + count + 1) // 2)
    if sys.byteorder == "big":
        raw = (raw >> np.uint64(32)) | (raw << np.uint64(32))
    return raw.view(np.uint32)[skipped : skipped + count]


def device_words(key: Key, blocks: torch.Tensor) -> torch.Tensor:
    """Return the words of blocks of a key's stream, on the device of ``blocks``.

    Args:
        key: The key.
        blocks: Indexes of blocks, int64, any shape; block ``b`` is words ``8 b`` to ``8 b + 8``.

    Returns:
        int64, in ``[0, 2^32)``, of the shape of ``blocks`` and one more dim of 8.
    """
    zero = torch.zeros_like(blocks)
    c0, c1, c2, c3 = blocks + 1, zero, zero, zero  # numpy counts before it draws
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ _signed(k0), low1, high0 ^ c3 ^ _signed(k1), low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK64, (k1 + _WEYL[1]) & _MASK64
    halves = [half for c in (c0, c1, c2, c3) for half in (c & _MASK32, _high(c))]
    return torch.stack(halves, dim=-1)


def _multiply(a: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 64 bits of a product of unsigned numbers; torch has signed ones, of the same bits."""
    a_high, a_low = a >> 32, a & _MASK32
    x_high, x_low = _high(x), x & _MASK32
    cross = x_low * a_high + _high(x_low * a_low)
    other = x_high * a_low + (cross & _MASK32)
    return x_high * a_high + _high(cross) + _high(other), x * _signed(a)


def _high(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & _MASK32


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
