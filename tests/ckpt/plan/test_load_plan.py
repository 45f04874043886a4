from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError
from vescale_ckpt.format.assemble import assemble
from vescale_ckpt.format.fragment import Fragment, FragmentChunks
from vescale_ckpt.format.records import Manifest, PackRecord, TensorRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.cover import check_cover
from vescale_ckpt.geometry.tiles import tile_shape
from vescale_ckpt.plan.load_plan import Want, chunks_needed, prove_cover, same_bytes
from vescale_ckpt.plan.parts import Part, chunks_of
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.digest import digest
from vescale_storage.pack import Codec


def record(name="w", shape=(40, 30), tile=None, alias_of=None):
    return TensorRecord((name,), "float32", shape, tile or tile_shape(shape, 4), alias_of=alias_of)


def stored(records, boxes, *, length=lambda raw: raw, codec=Codec.RAW, salt=""):
    """Return a manifest whose tensors were written as these boxes, without any bytes."""
    columns = {name: [] for name in ("tensor", "tile", "digest", "pack", "offset", "length", "codec")}
    partial, offset = [], 0
    for tensor, held in enumerate(boxes):
        for box in held:
            for chunk in chunks_of(Part(tensor, box, stored=True), records[tensor]):
                if not chunk.whole_tile:
                    partial.append((len(columns["tile"]), chunk.box))
                size = length(chunk.box.volume * 4)
                name = digest(f"{chunk.box}{salt}".encode())
                values = (tensor, chunk.tile, name, 0, offset, size, int(codec))
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
                offset += size
    packs = (PackRecord("0" * 64, offset + 1000),)
    fragment = Fragment(rank=0, plan_key=b"", chunks=FragmentChunks.of(**columns, partial=partial), packs=packs)
    chunks, packs = assemble([fragment], records)
    tree = DictNode(tuple((r.path[0], TensorNode()) for r in records))
    return Manifest("run", 3, 0.0, "0" * 32, 1, tree, tuple(records), chunks, packs)


def check_filled(manifest, wants, needs):
    """Check that the copies fill every want exactly once, from places in the chunks that hold just that."""
    filled = {number: [] for number in range(len(wants))}
    for need in needs:
        for copy in need.copies:
            want = wants[copy.want]
            assert copy.source.shape == copy.target.shape
            assert copy.source.shifted(need.box.offset) == copy.target.shifted(want.box.offset)
            assert Box.whole(need.box.shape).contains(copy.source)
            filled[copy.want].append(copy.target)
            assert need.tensor == manifest.resolve(want.tensor)
    for number, want in enumerate(wants):
        if want.box.volume:
            report = check_cover(want.box.shape, filled[number])
            assert not report.missing
            assert not report.overlaps
        else:
            assert filled[number] == []


SHARDS = [Box((0, 0), (17, 30)), Box((17, 0), (23, 13)), Box((17, 13), (23, 17))]


@pytest.mark.parametrize("tile", [(40, 30), (10, 10), (7, 30), (1, 30)])
@pytest.mark.parametrize("written", [[Box.whole((40, 30))], SHARDS], ids=["whole", "shards"])
def test_wants_are_filled_once_whatever_the_tiles_and_whoever_wrote(tile, written):
    manifest = stored([record(tile=tile), record("s", ())], [written, [Box((), ())]])
    wants = [
        Want(0, Box.whole((40, 30))),
        Want(0, Box((5, 29), (30, 1))),
        Want(1, Box((), ())),
        Want(0, Box((39, 29), (1, 1))),
        Want(0, Box((3, 3), (0, 5))),
    ]
    needs = chunks_needed(manifest, wants)
    check_filled(manifest, wants, needs)
    rows = [need.row for need in needs]
    assert rows == sorted(set(rows)), "each chunk once, by row"
    assert len(rows) == len(manifest.chunks)


def test_only_chunks_that_a_box_touches_are_needed():
    manifest = stored([record(shape=(100, 100), tile=(10, 10))], [[Box.whole((100, 100))]])
    assert len(chunks_needed(manifest, [Want(0, Box((0, 0), (10, 10)))])) == 1
    assert len(chunks_needed(manifest, [Want(0, Box((9, 9), (2, 2)))])) == 4
    assert len(chunks_needed(manifest, [Want(0, Box((0, 50), (100, 1)))])) == 10
    assert chunks_needed(manifest, []) == []


def test_parts_of_a_tile_that_a_box_does_not_touch_are_not_read():
    manifest = stored([record(tile=(40, 30))], [SHARDS])
    assert len(chunks_needed(manifest, [Want(0, Box((0, 0), (17, 30)))])) == 1


def test_an_alias_is_filled_from_what_it_is_an_alias_of():
    manifest = stored([record("a"), record("b", alias_of=0)], [[Box.whole((40, 30))], []])
    (need,) = chunks_needed(manifest, [Want(1, Box.whole((40, 30))), Want(0, Box((0, 0), (1, 1)))])
    assert need.tensor == 0
    assert [copy.want for copy in need.copies] == [0, 1]


def without_row(manifest, row):
    """Return the manifest with one chunk lost."""
    chunks = manifest.chunks
    first = chunks.first.copy()
    first[np.searchsorted(first, row, side="right") :] -= np.uint64(1)
    gone = chunks.partial_row == row
    later = chunks.partial_row - (chunks.partial_row > row)
    box = chunks.partial_box.reshape(len(gone), 4)[~gone].reshape(-1)
    columns = {
        name: np.delete(getattr(chunks, name), row, axis=0)
        for name in ("tile", "digest", "pack", "offset", "length", "codec")
    }
    changed = dataclasses.replace(
        chunks,
        first=first,
        partial_row=later[~gone].astype(np.uint64),
        partial_box=box,
        partial_start=np.arange(int((~gone).sum()) + 1) * 4,
        **columns,
    )
    return dataclasses.replace(manifest, chunks=changed)


@pytest.mark.parametrize("written", [[Box.whole((40, 30))], SHARDS], ids=["whole", "shards"])
def test_a_chunk_that_is_missing_is_told_before_anything_is_read(written):
    manifest = stored([record("a", tile=(10, 10)), record("b", tile=(10, 10))], [written, [Box.whole((40, 30))]])
    for tensor in (0, 1):
        prove_cover(manifest, tensor)
    for row in range(int(manifest.chunks.first[1])):
        damaged = without_row(manifest, row)
        with pytest.raises(CorruptionError, match=r"cannot use 'a' \(40, 30\) of run@3: not every element"):
            chunks_needed(damaged, [Want(0, Box((0, 0), (1, 1)))])
        assert chunks_needed(damaged, [Want(1, Box((0, 0), (1, 1)))])[0].row == int(damaged.chunks.first[1])


def test_an_element_that_stands_twice_is_told():
    manifest = stored([record(tile=(40, 30))], [[Box((0, 0), (20, 30)), Box((19, 0), (21, 30))]])
    with pytest.raises(CorruptionError, match="twice") as caught:
        prove_cover(manifest, 0)
    assert caught.value.context["fqn"] == "w"


def test_a_tensor_without_elements_is_covered():
    manifest = stored([record(shape=(0, 3))], [[]])
    prove_cover(manifest, 0)
    assert chunks_needed(manifest, [Want(0, Box.whole((0, 3)))]) == []


def test_bytes_are_the_same_where_digests_and_boxes_are():
    whole = [Box.whole((40, 30))]
    records = [record(name, tile=(10, 10)) for name in "abc"]
    manifest = stored([*records, record("d", alias_of=0)], [whole, whole, SHARDS, []])
    assert same_bytes(manifest, 0, 1)
    assert same_bytes(manifest, 3, 1)
    assert not same_bytes(manifest, 0, 2), "chunks of other boxes tell nothing"
    changed = manifest.chunks.digest.copy()
    changed[-1] ^= 1
    other = dataclasses.replace(manifest, chunks=dataclasses.replace(manifest.chunks, digest=changed))
    assert same_bytes(other, 0, 1)
    changed[0] ^= 1
    assert not same_bytes(
        dataclasses.replace(manifest, chunks=dataclasses.replace(manifest.chunks, digest=changed)), 0, 1
    )
    assert not same_bytes(stored([record("a"), record("b", (30, 40))], [whole, [Box.whole((30, 40))]]), 0, 1)
