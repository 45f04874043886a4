"""Boxes of strided tensors in files, against torch's own indexing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.interop.foreign import regions
from vescale_ckpt.interop.foreign.regions import Region, check_region, fill_region, row_major


def raw(tensor: torch.Tensor) -> bytes:
    fresh = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return fresh.view(torch.uint8).numpy().tobytes()


class Bytes:
    """A file in memory that counts what is asked of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.largest = 0

    def read_into(self, name, offset, out):
        assert name == "f"
        assert offset >= 0
        assert offset + len(out) <= len(self.data)
        self.largest = max(self.largest, len(out))
        out[:] = self.data[offset : offset + len(out)]


@st.composite
def views(draw):
    """A view of a small storage, and a box of it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
    gaps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    strides, step = [0] * len(shape), 1
    for dim, gap in zip(order, gaps, strict=True):
        strides[dim] = step * gap
        step = strides[dim] * max(1, shape[dim])
    offset = draw(st.integers(0, 3))
    storage = torch.randint(0, 255, ((step + offset + 1) * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    box_offset = tuple(draw(st.integers(0, n)) for n in shape)
    box_shape = tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, box_offset, strict=True))
    return storage, offset, shape, tuple(strides), Box(box_offset, box_shape)


@given(views(), st.sampled_from([1, 8, 64, 1 << 20]), st.booleans())
def test_any_box_of_any_view_is_what_torch_has(view, span_bytes, is_transposed):
    storage, offset, shape, strides, box = view
    expected = storage.as_strided(shape, strides, offset)[box.slices]
    region = Region("f", offset * storage.element_size(), storage.dtype, shape, strides)
    out = torch.zeros(box.shape[::-1], dtype=storage.dtype).permute(tuple(reversed(range(box.ndim))))
    if not is_transposed:
        out = torch.zeros(box.shape, dtype=storage.dtype)
    before, regions.SPAN_BYTES = regions.SPAN_BYTES, span_bytes
    try:
        fill_region(Bytes(storage.view(torch.uint8).numpy().tobytes()), region, box, out)
    finally:
        regions.SPAN_BYTES = before
    assert raw(out) == raw(expected)


def test_numbers_of_the_other_byte_order_are_turned():
    values = torch.tensor([1.5, -2.0, 3.25])
    data = values.numpy().astype(">f4").tobytes()
    out = torch.empty(3)
    fill_region(Bytes(data), Region("f", 0, torch.float32, (3,), (1,), big_endian=True), Box.whole((3,)), out)
    assert torch.equal(out, values)


def test_columns_are_read_in_bounded_pieces():
    source = torch.arange(4096 * 1024, dtype=torch.int32).view(4096, 1024)
    file = Bytes(source.numpy().tobytes())
    out = torch.empty(4096, 1, dtype=torch.int32)
    region = Region("f", 0, torch.int32, (4096, 1024), row_major((4096, 1024)))
    fill_region(file, region, Box((0, 5), (4096, 1)), out)
    assert torch.equal(out, source[:, 5:6])
    assert file.largest <= regions.SPAN_BYTES


@pytest.mark.parametrize(
    "region",
    [
        Region("f", 4, torch.float32, (4,), (1,)),
        Region("f", -4, torch.float32, (2,), (1,)),
        Region("f", 0, torch.float32, (2, 2), (4, 1)),
        Region("f", 0, torch.float32, (2,), (-1,)),
        Region("f", 0, torch.float32, (2,), ()),
        Region("f", 0, torch.float32, (1 << 30,), (0,)),
    ],
)
def test_a_region_that_leaves_its_bytes_or_repeats_them_without_end_is_refused(region):
    with pytest.raises(CorruptionError, match="leaves the 16 bytes"):
        check_region(region, 0, 16, "'x'")


def test_an_expanded_tensor_is_fine():
    region = Region("f", 0, torch.float32, (3, 4), (0, 1))
    assert check_region(region, 0, 16, "'x'") is region
