from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.format.checks import (
    KNOWN_CODECS,
    MAX_TILES,
    TensorShapes,
    check_chunks,
    check_stored,
    check_tensors,
    check_tree,
    partial_starts,
    tile_boxes,
)
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.codec import Codec


def test_the_codecs_are_those_that_storage_has():
    assert tuple(int(codec) for codec in Codec) == KNOWN_CODECS


def test_shapes_as_columns(manifest):
    shapes = TensorShapes.of(manifest.tensors)
    assert shapes.ndim.tolist() == [2, 2, 2, 0, 1, 1, 1]
    assert shapes.start.tolist() == [0, 2, 4, 6, 6, 7, 8, 9]
    assert shapes.num_tiles.tolist() == [6, 0, 0, 1, 1, 1, 1]  # the third is an alias
    for tensor, count in zip(manifest.tensors, shapes.num_tiles.tolist(), strict=True):
        if tensor.alias_of is None:
            assert TileGrid(tensor.shape, tensor.tile).num_tiles == count


def test_tile_boxes_are_those_of_the_grid():
    tensors = [
        TensorRecord(("a",), "int8", (10, 7, 5), (4, 3, 5)),
        TensorRecord(("b",), "int8", (3,), (2,)),
        TensorRecord(("c",), "int8", (1, 9, 2), (1, 2, 1)),
        TensorRecord(("d",), "int8", (), ()),
    ]
    shapes = TensorShapes.of(tensors)
    for index, tensor in enumerate(tensors):
        grid = TileGrid(tensor.shape, tensor.tile)
        tiles = np.arange(grid.num_tiles)
        offsets, sizes = tile_boxes(shapes, np.full(grid.num_tiles, index), tiles, grid.ndim)
        wanted_offsets, wanted_sizes = grid.boxes(tiles)
        assert np.array_equal(offsets, wanted_offsets)
        assert np.array_equal(sizes, wanted_sizes)
    both = np.array([0, 2, 0])
    offsets, _ = tile_boxes(shapes, both, np.array([0, 1, 8]), 3)
    assert offsets.tolist() == [[0, 0, 0], [0, 0, 1], list(TileGrid((10, 7, 5), (4, 3, 5)).box(8).offset)]


@pytest.mark.parametrize(
    ("shape", "tile", "says"),
    [
        ((4,), (5,), "tiles that do not fit"),
        ((4,), (0,), "tiles that do not fit"),
        ((0,), (2,), "tiles that do not fit"),
        ((4, 4), (4,), "other dims"),
        ((1,) * 65, (1,) * 65, "more than 64 dims"),
        ((2**33,), (1,), "tiles"),
        ((2**20, 2**20), (1, 1), "tiles"),
        ((2**62,), (2**62,), "elements"),
        ((2**63 - 1, 2**63 - 1, 2**63 - 1), (2**63 - 1,) * 3, "elements"),
        ((2**63 - 1,) * 64, (2**63 - 1,) * 64, "elements"),
        ((2**63,), (2**63,), "2\\^63"),
        ((2**100,), (1,), "2\\^63"),
    ],
)
def test_impossible_shapes_are_refused(shape, tile, says):
    with pytest.raises(CorruptionError, match=says):
        TensorShapes.of([TensorRecord(("a",), "int8", shape, tile)])


@pytest.mark.parametrize(
    ("shape", "tile", "count"),
    [
        ((), (), 1),
        ((0,), (1,), 0),
        ((2**40, 0), (1, 1), 0),
        ((2**63 - 1, 2**63 - 1, 0), (1, 1, 1), 0),
        ((2**61,), (2**60,), 2),
        ((MAX_TILES,), (1,), MAX_TILES),
    ],
)
def test_possible_shapes_pass(shape, tile, count):
    assert TensorShapes.of([TensorRecord(("a",), "int8", shape, tile)]).num_tiles.tolist() == [count]


def test_a_tensor_is_named_by_its_place():
    good = TensorRecord(("a",), "int8", (4,), (4,))
    with pytest.raises(CorruptionError, match="tensor 2 of 3"):
        TensorShapes.of([good, good, TensorRecord(("b",), "int8", (4,), (5,))])


def alias(path, of, dtype="int8", shape=(4,)):
    return TensorRecord((path,), dtype, shape, (4,), alias_of=of)


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (alias("b", 1), "does not come before"),
        (alias("b", 2), "does not come before"),
        (alias("b", -1), "does not come before"),
        (alias("b", 0, dtype="uint8"), "uint8"),
        (alias("b", 0, shape=(5,)), r"\(5,\)"),
        (TensorRecord(("a",), "int8", (4,), (4,)), "tensor 0 has the same path"),
    ],
)
def test_records_that_contradict_one_another_are_refused(second, says):
    with pytest.raises(CorruptionError, match=says):
        check_tensors([TensorRecord(("a",), "int8", (4,), (4,)), second], "thing")


def test_an_alias_of_an_alias_is_refused():
    tensors = [TensorRecord(("a",), "int8", (4,), (4,)), alias("b", 0), alias("c", 1)]
    with pytest.raises(CorruptionError, match=r"tensor 2, 'c': .*alias itself"):
        check_tensors(tensors, "thing")
    check_tensors([*tensors[:2], alias("c", 0)], "thing")


def test_tree_and_tensors_name_the_same_paths(manifest):
    check_tree(manifest.tree, manifest.tensors, "thing")
    check_tree(manifest.tree, manifest.tensors[::-1], "thing")
    with pytest.raises(CorruptionError, match=r"no tensor for \('rng', 1\)"):
        check_tree(manifest.tree, manifest.tensors[:-1], "thing")
    extra = TensorRecord(("x",), "int8", (4,), (4,))
    with pytest.raises(CorruptionError, match=r"no place for \('x',\)"):
        check_tree(manifest.tree, (*manifest.tensors, extra), "thing")
    with pytest.raises(CorruptionError, match=r"no tensor for \('a', '0'\)"):
        check_tree(
            DictNode((("a", DictNode((("0", TensorNode()),))),)), [TensorRecord(("a", 0), "int8", (1,), (1,))], "thing"
        )


def stored(**changes):
    columns = {
        "pack": np.array([0, 1, 1], np.uint32),
        "offset": np.array([0, 0, 90], np.uint64),
        "length": np.array([50, 100, 10], np.uint32),
        "codec": np.array([0, 1, 0], np.uint8),
    }
    for name, (row, value) in changes.items():
        columns[name][row] = value
    check_stored(*columns.values(), pack_sizes=np.array([50, 100], np.uint64), what="thing")


def test_chunks_that_fill_their_packs_pass():
    stored()
    check_stored(
        *(np.zeros(0, dtype) for dtype in (np.uint32, np.uint64, np.uint32, np.uint8)),
        pack_sizes=np.zeros(0, np.uint64),
        what="thing",
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pack": (1, 2)}, "chunk 1 of 3 names a pack beyond"),
        ({"pack": (1, 2**32 - 1)}, "names a pack beyond"),
        ({"offset": (2, 91)}, "chunk 2 of 3 ends after"),
        ({"offset": (0, 2**64 - 1)}, "chunk 0 of 3 ends after"),
        ({"offset": (0, 2**64 - 50)}, "ends after"),
        ({"length": (0, 51)}, "ends after"),
        ({"length": (0, 2**32 - 1)}, "ends after"),
        ({"length": (1, 0)}, "chunk 1 of 3 has no bytes"),
        ({"codec": (0, 2)}, "codec"),
        ({"codec": (0, 255)}, "codec"),
    ],
)
def test_chunks_that_cannot_lie_there_are_refused(change, says):
    with pytest.raises(CorruptionError, match=says) as caught:
        stored(**change)
    assert caught.value.context["row"] == next(iter(change.values()))[0]


def edited(chunks, name, at, value):
    column = getattr(chunks, name).copy()
    column[at] = value
    return dataclasses.replace(chunks, **{name: column})


@pytest.mark.parametrize(
    ("name", "at", "value", "says"),
    [
        ("first", 0, 1, "do not own"),
        ("first", -1, 10, "do not own"),
        ("first", -1, 2**64 - 1, "do not own"),
        ("first", 1, 8, "ascending"),
        ("first", 2, 2**63, "ascending"),
        ("tile", 6, 6, "chunk 6 of 11 is of a tile that its tensor does not have"),
        ("tile", 7, 2**32 - 1, "chunk 7 of 11 is of a tile"),
        ("tile", 3, 0, "chunk 3 of 11 is of an earlier tile"),
        ("partial_row", 1, 1, "ascending"),
        ("partial_row", 0, 3, "ascending"),
        ("partial_row", 1, 11, "ascending"),
        ("partial_row", 1, 2**64 - 1, "ascending"),
        ("partial_row", 1, 7, "dims"),
        ("partial_row", 1, 4, "chunk 4 of 11 is a box"),
        ("partial_box", 1, 2, "chunk 1 of 11 is a box"),
        ("partial_box", 1, 4, "chunk 1 of 11 is a box"),
        ("partial_box", 1, 2**64 - 1, "is a box"),
        ("partial_box", 2, 0, "is a box"),
        ("partial_box", 2, 5, "is a box"),
        ("partial_box", 2, 4, "is a box"),  # all of its tile
        ("partial_box", 2, 2**64 - 1, "is a box"),
        ("partial_box", 4, 4, "chunk 2 of 11 is a box"),
        ("partial_start", 1, 3, "dims"),
    ],
)
def test_rows_that_do_not_belong_are_refused(manifest, name, at, value, says):
    with pytest.raises(CorruptionError, match=says):
        check_chunks(edited(manifest.chunks, name, at, value), TensorShapes.of(manifest.tensors), "thing")


def test_rows_of_an_alias_are_refused(manifest):
    chunks = edited(manifest.chunks, "first", 2, 6)  # the alias would own row 6
    chunks = edited(chunks, "first", 1, 6)
    with pytest.raises(CorruptionError, match="chunk 6 of 11"):
        check_chunks(chunks, TensorShapes.of(manifest.tensors), "thing")


def test_good_rows_pass(manifest):
    check_chunks(manifest.chunks, TensorShapes.of(manifest.tensors), "thing")


def test_partial_starts():
    assert partial_starts(np.array([2, 0, 3])).tolist() == [0, 4, 4, 10]
    assert partial_starts(np.zeros(0, np.int64)).tolist() == [0]
