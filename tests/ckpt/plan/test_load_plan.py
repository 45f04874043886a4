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
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.layout.placement import Shard
from vescale_ckpt.plan.load_plan import Want, chunks_needed, prove_cover, raw_bytes_of, same_bytes, share_reads
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


def test_decoded_sizes_do_not_depend_on_the_codec():
    boxes = [SHARDS, [Box.whole((40, 30))]]
    records = [record("a", tile=(10, 10)), record("b", tile=(10, 10))]
    raw = stored(records, boxes)
    packed = stored(records, boxes, length=lambda n: n // 2, codec=Codec.ZSTD)
    rows = np.arange(len(raw.chunks))
    assert raw_bytes_of(packed, rows).tolist() == raw_bytes_of(raw, rows).tolist() == raw.chunks.length.tolist()
    assert raw_bytes_of(packed, rows[3:7]).tolist() == raw.chunks.length[3:7].tolist()


# ---- who reads


def needed_by(manifest, boxes):
    return [
        np.array([need.row for need in chunks_needed(manifest, [Want(0, box) for box in held])], dtype=np.int64)
        for held in boxes
    ]


def shares(manifest, needed, round_bytes=1 << 30):
    return [share_reads(manifest, needed, rank=rank, round_bytes=round_bytes) for rank in range(len(needed))]


def check_shares(manifest, needed, every):
    """Check that every row is read once, by a rank that needs it, and that all ranks take the same rounds."""
    readers = {}
    for rank, share in enumerate(every):
        for row in share.own.tolist():
            assert readers.setdefault(row, rank) == rank
        for mine, theirs in zip(share.rounds, every[0].rounds, strict=True):
            for field in ("rows", "raw_bytes", "reader", "wanted"):
                assert np.array_equal(getattr(mine, field), getattr(theirs, field))
    for turn in every[0].rounds:
        for at, (row, reader) in enumerate(zip(turn.rows.tolist(), turn.reader.tolist(), strict=True)):
            assert row not in readers
            readers[row] = reader
            assert turn.wanted[:, at].tolist() == [row in rows for rows in needed]
    assert set(readers) == {int(row) for rows in needed for row in rows}
    assert all(row in needed[rank] for row, rank in readers.items())
    stored_bytes = manifest.chunks.length
    return [
        sum(int(stored_bytes[row]) for row, reader in readers.items() if reader == rank) for rank in range(len(needed))
    ]


def sharded(shape, dim, world_size):
    layout = Layout((world_size,), (Shard(dim),))
    return [[span.box for span in spans(layout, shape, (rank,))] for rank in range(world_size)]


def test_what_one_rank_needs_it_reads_without_the_others():
    manifest = stored([record(shape=(64, 64), tile=(8, 8))], [[Box.whole((64, 64))]])
    needed = needed_by(manifest, sharded((64, 64), 0, 8))
    every = shares(manifest, needed)
    assert all(share.rounds == () for share in every)
    assert check_shares(manifest, needed, every) == [64 * 64 * 4 // 8] * 8


def test_one_rank_alone_reads_all():
    manifest = stored([record(tile=(8, 8))], [[Box.whole((40, 30))]])
    needed = needed_by(manifest, [[Box.whole((40, 30))]])
    assert check_shares(manifest, needed, shares(manifest, needed)) == [4800]


def test_copies_are_read_once_and_evenly():
    manifest = stored([record(shape=(640, 64), tile=(8, 8))], [[Box.whole((640, 64))]])
    needed = needed_by(manifest, [[Box.whole((640, 64))]] * 5)
    loads = check_shares(manifest, needed, shares(manifest, needed))
    assert max(loads) == min(loads) == 640 * 64 * 4 // 5


def test_a_rank_that_reads_much_alone_is_spared():
    manifest = stored([record(shape=(80, 64), tile=(8, 64))], [[Box.whole((80, 64))]])
    needed = needed_by(manifest, [[Box.whole((80, 64))], [Box((64, 0), (16, 64))], []])
    loads = check_shares(manifest, needed, shares(manifest, needed))
    assert loads[0] == 8 * 2048, "rank 0 alone needs eight chunks, so rank 1 reads the two that both need"
    assert loads == [8 * 2048, 2 * 2048, 0]


@pytest.mark.parametrize(("dim", "world_size"), [(0, 3), (1, 5), (0, 7), (1, 16), (0, 64)])
def test_edges_that_are_no_tile_lines_are_shared(dim, world_size):
    manifest = stored([record(shape=(100, 96), tile=(16, 16))], [[Box.whole((100, 96))]])
    needed = needed_by(manifest, sharded((100, 96), dim, world_size))
    every = shares(manifest, needed)
    loads = check_shares(manifest, needed, every)
    assert sum(loads) == 100 * 96 * 4
    assert every[0].rounds


@pytest.mark.parametrize("round_bytes", [1, 1000, 1024, 2500, 10**6])
def test_rounds_are_bounded_but_for_a_chunk_that_is_larger(round_bytes):
    manifest = stored([record(shape=(64, 64), tile=(16, 16))], [[Box.whole((64, 64))]])
    needed = needed_by(manifest, [[Box.whole((64, 64))]] * 3)
    every = shares(manifest, needed, round_bytes)
    check_shares(manifest, needed, every)
    for turn in every[0].rounds:
        assert turn.raw_bytes.sum() <= round_bytes or len(turn.rows) == 1
    assert len(every[0].rounds) == {1: 16, 1000: 16, 1024: 16, 2500: 8, 10**6: 1}[round_bytes]


def test_rounds_count_decoded_bytes_for_they_are_what_is_exchanged():
    manifest = stored(
        [record(shape=(64, 64), tile=(16, 16))], [[Box.whole((64, 64))]], length=lambda n: n // 4, codec=Codec.ZSTD
    )
    needed = needed_by(manifest, [[Box.whole((64, 64))]] * 2)
    (turn,) = shares(manifest, needed)[0].rounds
    assert turn.raw_bytes.tolist() == [1024] * 16


def test_nobody_needs_anything():
    manifest = stored([record()], [[Box.whole((40, 30))]])
    every = shares(manifest, [np.empty(0, dtype=np.int64)] * 3)
    assert all(share.own.size == 0 and share.rounds == () for share in every)


def test_a_thousand_ranks_share_what_each_of_them_would_read():
    shape = (4096, 48)
    manifest = stored([record(shape=shape, tile=(64, 16))], [[Box.whole(shape)]])
    needed = needed_by(manifest, sharded(shape, 0, 1024))
    some = [share_reads(manifest, needed, rank=rank, round_bytes=1 << 30) for rank in range(0, 1024, 93)]
    loads = check_shares(manifest, needed, some)
    assert sum(loads) == 4096 * 48 * 4, "a sixteenth of what they would read if each read what it needs"
    assert max(loads) == 64 * 16 * 4
