from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vescale_ckpt.errors import InternalError, InvalidInputError, LayoutError, NotFoundError
from vescale_ckpt.format.records import ChunkTable, TensorRecord
from vescale_ckpt.geometry.tiles import TileGrid
from vescale_ckpt.state.tree import DictNode, TensorNode


def test_rows_of_each_tensor(manifest):
    assert [manifest.chunks.rows(i) for i in range(len(manifest.tensors))] == [
        range(7),
        range(7, 7),
        range(7, 7),
        range(7, 8),
        range(8, 9),
        range(9, 10),
        range(10, 11),
    ]
    assert len(manifest.chunks) == 11


def test_boxes_are_tiles_or_the_parts_that_are_listed(manifest):
    tensor = manifest.tensors[0]
    offsets, sizes = manifest.chunks.boxes_of(tensor, manifest.chunks.rows(0))
    grid = TileGrid(tensor.shape, tensor.tile)
    wanted = [grid.box(int(tile)) for tile in manifest.chunks.tile[:7]]
    assert offsets.tolist() == [[0, 0], [0, 3], [2, 3], *[list(box.offset) for box in wanted[3:]]]
    assert sizes.tolist() == [[4, 3], [2, 3], [2, 3], *[list(box.shape) for box in wanted[3:]]]
    assert offsets.dtype == sizes.dtype == np.int64


def test_boxes_of_some_rows(manifest):
    tensor = manifest.tensors[0]
    offsets, sizes = manifest.chunks.boxes_of(tensor, range(2, 4))
    assert offsets.tolist() == [[2, 3], [4, 0]]
    assert sizes.tolist() == [[2, 3], [4, 3]]
    places, boxes = manifest.chunks.partials_of(tensor, range(2, 4))
    assert places.tolist() == [0]
    assert boxes.tolist() == [[2, 3, 2, 3]]
    places, boxes = manifest.chunks.partials_of(tensor, range(3, 7))
    assert places.tolist() == []
    assert boxes.shape == (0, 4)


def test_a_0d_tensor_has_one_chunk_of_one_element(manifest):
    offsets, sizes = manifest.chunks.boxes_of(manifest.tensors[3], manifest.chunks.rows(3))
    assert offsets.shape == sizes.shape == (1, 0)
    assert manifest.chunks.raw_bytes(manifest.tensors[3], manifest.chunks.rows(3), 2).tolist() == [2]


def test_an_empty_tensor_has_no_chunks(manifest):
    offsets, _ = manifest.chunks.boxes_of(manifest.tensors[1], manifest.chunks.rows(1))
    assert offsets.shape == (0, 2)
    assert manifest.chunks.raw_bytes(manifest.tensors[1], manifest.chunks.rows(1), 4).tolist() == []


def test_raw_bytes_count_the_parts_and_not_their_tiles(manifest):
    raw = manifest.chunks.raw_bytes(manifest.tensors[0], manifest.chunks.rows(0), 2)
    assert raw.tolist() == [24, 12, 12, 24, 24, 12, 12]
    assert raw.sum() == 10 * 6 * 2


def test_rows_of_another_tensor_are_refused(manifest):
    with pytest.raises(LayoutError):
        manifest.chunks.boxes_of(manifest.tensors[3], manifest.chunks.rows(0))


def test_tables_compare_by_content(manifest):
    chunks = manifest.chunks
    assert chunks == dataclasses.replace(chunks, tile=chunks.tile.copy())
    assert chunks != dataclasses.replace(chunks, tile=chunks.tile + np.uint32(1))
    assert chunks != 1
    assert manifest == dataclasses.replace(manifest)
    with pytest.raises(TypeError):
        hash(manifest)
    with pytest.raises(TypeError):
        hash(chunks)


def test_columns_of_other_types_or_lengths_are_our_bug(manifest):
    chunks = manifest.chunks
    for name, wrong in [
        ("tile", chunks.tile.astype(np.int64)),
        ("pack", chunks.pack[:-1]),
        ("digest", chunks.digest[:, :31]),
        ("partial_box", chunks.partial_box.astype(np.int64)),
    ]:
        with pytest.raises(InternalError, match=f"column {name}"):
            dataclasses.replace(chunks, **{name: wrong})
    for name in ("first", "partial_start"):
        with pytest.raises(InternalError, match=name):
            dataclasses.replace(chunks, **{name: getattr(chunks, name).astype(np.int32)})


def test_an_empty_table():
    table = ChunkTable.empty(3)
    assert len(table) == 0
    assert [table.rows(i) for i in range(3)] == [range(0)] * 3
    assert table.boxes_of(TensorRecord((), "int8", (0,), (1,)), table.rows(0))[0].shape == (0, 1)


def test_find_takes_a_path_or_a_name(manifest):
    assert manifest.find(("model", "scale")) == 3
    assert manifest.find("model.scale") == 3
    assert manifest.find(("rng", 1)) == 6
    assert manifest.find("rng.1") == 6
    assert manifest.by_path["extra", 0] == 4
    assert manifest.by_fqn["extra.0"] == (4,)
    assert manifest.tensors[4].fqn == "extra.0"


def test_what_is_not_there_is_named_with_what_ends_alike(manifest):
    with pytest.raises(NotFoundError, match=r"'bias' in llama é@1200: it has 7 others, among them 'model.bias'"):
        manifest.find("bias")
    with pytest.raises(NotFoundError, match=r"\('rng', '1'\)"):
        manifest.find(("rng", "1"))
    with pytest.raises(NotFoundError):
        manifest.find("")


def test_an_ambiguous_name_is_refused_only_when_it_is_asked_for(manifest):
    t = TensorNode()
    tree = DictNode((("a.b", t), ("a", DictNode((("b", t), ("c", t))))))
    tensors = tuple(TensorRecord(path, "int8", (0,), (1,)) for path in [("a.b",), ("a", "b"), ("a", "c")])
    both = dataclasses.replace(manifest, tree=tree, tensors=tensors, chunks=ChunkTable.empty(3))
    assert both.find("a.c") == 2
    assert both.find(("a.b",)) == 0
    assert both.find(("a", "b")) == 1
    with pytest.raises(InvalidInputError) as caught:
        both.find("a.b")
    assert "('a.b',)" in caught.value.message
    assert "('a', 'b')" in caught.value.message


def test_replace_does_not_carry_over_the_index_of_another_manifest(manifest):
    assert manifest.find("model.w") == 0
    other = dataclasses.replace(manifest, tensors=manifest.tensors[1:])
    assert other.find("model.bias") == 0


def test_an_alias_has_the_chunks_of_its_origin(manifest):
    assert manifest.resolve(2) == 0
    assert manifest.resolve(3) == 3
