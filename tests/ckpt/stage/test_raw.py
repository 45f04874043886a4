from __future__ import annotations

import numpy as np
import pytest
import torch

from vescale_ckpt.stage.raw import ALIGN_BYTES, aligned, as_integers, memory_of, shaped
from vescale_ckpt.state.dtypes import dtype_from_name

DTYPES = [
    dtype_from_name(name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2"),
    )
]


def random_bits(dtype, shape):
    """Return a tensor of random bits, NaN payloads and all."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.from_numpy(
        np.random.default_rng(7).integers(0, 2 if dtype is torch.bool else 256, count, dtype=np.uint8)
    )
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_survives_a_copy_through_integers(dtype):
    source = random_bits(dtype, (6, 5))
    for view in (source, source.t(), source[::2, 1:]):
        as_items = as_integers(view)
        assert as_items.shape == view.shape
        assert as_items.data_ptr() == view.data_ptr()
        buffer = torch.zeros(4096, dtype=torch.uint8)
        target = shaped(buffer, 128, dtype, tuple(view.shape))
        target.copy_(as_items)
        back = buffer[128 : 128 + view.numel() * dtype.itemsize].clone().view(dtype).view(view.shape)
        assert torch.equal(back.view(torch.uint8), view.contiguous().view(torch.uint8))
        assert not buffer[:128].any()


def test_scalars_and_empty_tensors_have_bytes_too():
    assert as_integers(torch.tensor(1.5)).shape == ()
    assert as_integers(torch.empty(0, 3)).shape == (0, 3)
    buffer = torch.zeros(64, dtype=torch.uint8)
    shaped(buffer, 0, torch.float32, ()).copy_(as_integers(torch.tensor(-0.0)))
    assert buffer[:4].tolist() == [0, 0, 0, 128]
    assert shaped(buffer, 0, torch.float32, (0, 3)).shape == (0, 3)


def test_items_begin_where_every_width_may():
    assert [aligned(n) for n in (0, 1, ALIGN_BYTES, ALIGN_BYTES + 1)] == [0, ALIGN_BYTES, ALIGN_BYTES, 2 * ALIGN_BYTES]
    assert all(ALIGN_BYTES % dtype.itemsize == 0 for dtype in DTYPES)


def test_a_buffer_and_its_memory_are_the_same_bytes():
    buffer = torch.zeros(16, dtype=torch.uint8)
    view = memory_of(buffer)
    view[3] = 7
    assert buffer[3] == 7
    assert (view.format, view.ndim, len(view)) == ("B", 1, 16)
