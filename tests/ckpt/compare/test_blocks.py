from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.compare.blocks import blocks
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tiles import tile_shape


@given(
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    item_bytes=st.sampled_from([1, 2, 4, 8]),
    most_bytes=st.integers(1, 4096),
)
def test_blocks_cover_a_tensor_once(shape, item_bytes, most_bytes):
    found = list(blocks(shape, item_bytes, most_bytes))
    assert check_cover(shape, found).ok
    assert bool(found) == (math.prod(shape) > 0)


def test_a_block_is_whole_tiles_and_no_larger_than_asked():
    shape, most = (6000, 3000), 16 << 20
    tile = tile_shape(shape, 4)
    found = list(blocks(shape, 4, most))
    assert len(found) > 1
    for box in found:
        assert box.volume * 4 <= most
        assert all(offset % size == 0 for offset, size in zip(box.offset, tile, strict=True))


def test_a_tile_that_is_more_than_asked_is_a_block():
    shape = (4096, 4096)
    tile = tile_shape(shape, 4)
    assert {box.shape for box in blocks(shape, 4, 1)} == {tile}


def test_a_scalar_is_one_block():
    assert [box.shape for box in blocks((), 4)] == [()]
