from __future__ import annotations

import pytest
import torch
from safetensors.torch import _SIZE, _TYPES, save

from vescale_ckpt.interop.safetensors.dtypes import (
    BITS,
    file_shape,
    num_bytes,
    safetensors_dtype,
    torch_dtype,
    torch_shape,
)
from vescale_ckpt.interop.safetensors.header import parse_header
from vescale_ckpt.state.dtypes import DTYPE_NAMES, dtype_from_name

LIBRARY = sorted((dtype for dtype in _SIZE if dtype is not None), key=str)


@pytest.mark.parametrize("dtype", LIBRARY, ids=str)
def test_every_dtype_that_the_library_writes_has_the_librarys_name_shape_and_size(dtype):
    data = save({"t": torch.zeros(2, 4 * dtype.itemsize, dtype=torch.uint8).view(dtype)})
    length = int.from_bytes(data[:8], "little")
    entry = parse_header(data[8 : 8 + length], len(data) - 8 - length, "saved").tensors["t"]
    assert safetensors_dtype(dtype) == entry.dtype
    assert torch_dtype(entry.dtype) == dtype
    assert file_shape(entry.dtype, (2, 4)) == entry.shape
    assert torch_shape(entry.dtype, entry.shape) == (2, 4)
    assert num_bytes(entry.dtype, entry.shape) == entry.num_bytes == 8 * dtype.itemsize


@pytest.mark.parametrize("name", sorted(_TYPES))
def test_every_dtype_that_the_library_reads_is_the_same_here(name):
    assert torch_dtype(name) == _TYPES[name]


def test_what_a_store_holds_and_safetensors_does_not_is_known():
    unknown = {name for name in DTYPE_NAMES if safetensors_dtype(dtype_from_name(name)) is None}
    assert unknown == {"complex32", "complex128"}


def test_six_bit_floats_are_known_and_not_torchs():
    assert [name for name in BITS if torch_dtype(name) is None] == ["F6_E2M3", "F6_E3M2"]
    assert num_bytes("F6_E2M3", (4,)) == 3
    assert num_bytes("F6_E2M3", (2,)) is None


def test_four_bit_floats_are_counted_in_pairs():
    assert torch_shape("F4", (3, 8)) == (3, 4)
    assert torch_shape("F4", (3, 7)) is None
    assert torch_shape("F4", ()) is None
    assert file_shape("F4", (3, 4)) == (3, 8)
    assert file_shape("F4", ()) is None
