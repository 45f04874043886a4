from __future__ import annotations

import dataclasses
import hashlib
import random
import time

import numpy as np
import pytest

from vescale_ckpt.errors import CorruptionError, MismatchError
from vescale_ckpt.format.assemble import assemble, check_agreement
from vescale_ckpt.format.fragment import Fragment, FragmentChunks
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import PackRecord, TensorRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tile_cover import check_tile_cover_columns
from vescale_ckpt.geometry.tiles import TileGrid


def pack(name, size=10_000):
    return PackRecord(hashlib.sha256(name.encode()).hexdigest(), size)


def digest_of(tensor, box):
    return hashlib.sha256(repr((tensor, box)).encode()).digest()


def fragment_of(rank, tensors, work, packs):
    """Return the fragment of a rank that wrote ``work``, (tensor, tile, box) each, one byte an element."""
    grids = {t: TileGrid(tensors[t].shape, tensors[t].tile) for t in range(len(tensors))}
    partial = [(row, box) for row, (t, tile, box) in enumerate(work) if box != grids[t].box(tile)]
    chunks = FragmentChunks.of(
        tensor=[t for t, _, _ in work],
        tile=[tile for _, tile, _ in work],
        digest=[digest_of(t, box) for t, _, box in work],
        pack=[row % len(packs) for row in range(len(work))],
        offset=[7 * row for row in range(len(work))],
        length=[box.volume for _, _, box in work],
        codec=[0] * len(work),
        partial=partial,
    )
    return Fragment(rank=rank, plan_key=b"key", chunks=chunks, packs=packs)


TENSORS = (
    TensorRecord(("a",), "int8", (10, 6), (4, 3)),
    TensorRecord(("b",), "int8", (), ()),
    TensorRecord(("tied",), "int8", (10, 6), (4, 3), alias_of=0),
    TensorRecord(("empty",), "int8", (0,), (1,)),
    TensorRecord(("c",), "int8", (3, 5, 4), (2, 5, 2)),
    TensorRecord(("d",), "int8", (9,), (4,)),
)


def all_work(rng):
    """Return every tile of every tensor, some of them cut in two or three parts."""
    work = []
    for t, tensor in enumerate(TENSORS):
        if tensor.alias_of is not None:
            continue
        grid = TileGrid(tensor.shape, tensor.tile)
        for tile in range(grid.num_tiles):
            parts = [grid.box(tile)]
            for _ in range(rng.choice([0, 0, 1, 2])):
                box = parts.pop(0)
                dims = [d for d in range(box.ndim) if box.shape[d] > 1]
                if dims:
                    d = rng.choice(dims)
                    cut = rng.randrange(1, box.shape[d])
                    shape = (*box.shape[:d], cut, *box.shape[d + 1 :])
                    first = Box(box.offset, shape)
                    parts += [first, *box.subtract(first)]
                else:
                    parts.append(box)
            work += [(t, tile, box) for box in parts]
    return work


@pytest.mark.parametrize("seed", range(20))
def test_whatever_rank_wrote_what_the_table_is_the_same(seed):
    rng = random.Random(seed)
    work = all_work(rng)
    tables = []
    for world_size in (1, 3, 7):
        order = work[:]
        rng.shuffle(order)
        packs = tuple(pack(f"p{i}") for i in range(3))
        fragments = [fragment_of(r, TENSORS, order[r::world_size], packs) for r in range(world_size)]
        rng.shuffle(fragments)
        table, _ = assemble(fragments, TENSORS)
        tables.append(table)
    for name in ("first", "tile", "digest", "length", "partial_row", "partial_box", "partial_start"):
        for table in tables[1:]:
            assert np.array_equal(getattr(tables[0], name), getattr(table, name)), name

    table = tables[0]
    for t, tensor in enumerate(TENSORS):
        rows = table.rows(t)
        offsets, sizes = table.boxes_of(tensor, rows)
        boxes = [Box(tuple(o), tuple(s)) for o, s in zip(offsets.tolist(), sizes.tolist(), strict=True)]
        assert sorted(boxes) == sorted(box for of, _, box in work if of == t)
        assert [bytes(d) for d in table.digest[rows.start : rows.stop]] == [digest_of(t, box) for box in boxes]
        assert table.length[rows.start : rows.stop].tolist() == [box.volume for box in boxes]
        if tensor.alias_of is None:
            places, parts = table.partials_of(tensor, rows)
            tiles = table.tile[rows.start : rows.stop]
            assert check_tile_cover_columns(tensor.shape, tensor.tile, tiles, places, parts).ok
        else:
            assert len(rows) == 0


def test_packs_are_united_by_name_and_only_those_in_use_stay():
    grid = TileGrid((9,), (4,))
    work = [(5, tile, grid.box(tile)) for tile in range(3)]
    shared, unused = pack("shared"), pack("unused")
    fragments = [
        fragment_of(0, TENSORS, work[:1], (shared, unused)),
        fragment_of(1, TENSORS, work[1:], (pack("mine", 99), shared)),
    ]
    table, packs = assemble(fragments, TENSORS)
    assert list(packs) == sorted([shared, pack("mine", 99)], key=lambda p: p.name)
    assert [packs[i] for i in table.pack.tolist()] == [shared, pack("mine", 99), shared]
    assert assemble(fragments[::-1], TENSORS)[1] == packs


def test_what_comes_out_makes_a_manifest(manifest):
    chunks = manifest.chunks
    rows = np.arange(len(chunks))
    tensor = np.repeat(np.arange(len(manifest.tensors)), np.diff(chunks.first.astype(int)))
    fragments = []
    for rank in (1, 0):
        mine = rows[rows % 2 == rank]
        boxes = [
            (place, Box(tuple(box[:2]), tuple(box[2:])))
            for place, row in enumerate(mine.tolist())
            for at, box in zip(chunks.partial_row.tolist(), chunks.partial_box.reshape(-1, 4).tolist(), strict=True)
            if at == row
        ]
        fragments.append(
            Fragment(
                rank=rank,
                plan_key=b"",
                packs=manifest.packs,
                chunks=FragmentChunks.of(
                    tensor=tensor[mine].tolist(),
                    digest=[bytes(d) for d in chunks.digest[mine]],
                    partial=boxes,
                    **{n: getattr(chunks, n)[mine].tolist() for n in ("tile", "pack", "offset", "length", "codec")},
                ),
            )
        )
    table, packs = assemble(fragments, manifest.tensors)
    made = dataclasses.replace(manifest, chunks=table, packs=packs)
    assert decode_manifest(encode_manifest(made)) == made
    assert packs == manifest.packs[::-1]  # by name
    assert table == dataclasses.replace(chunks, pack=1 - chunks.pack)


def test_a_part_that_is_all_of_its_tile_becomes_the_tile():
    chunks = FragmentChunks.of(
        tensor=[5, 5, 1],
        tile=[2, 0, 0],
        digest=[b"x" * 32] * 3,
        pack=[0] * 3,
        offset=[0] * 3,
        length=[1] * 3,
        codec=[0] * 3,
        partial=[(0, Box((8,), (1,))), (1, Box((0,), (2,))), (2, Box((), ()))],
    )
    table, _ = assemble([Fragment(rank=0, plan_key=b"", chunks=chunks, packs=(pack("p"),))], TENSORS)
    assert table.partial_row.tolist() == [1]
    assert table.partial_box.tolist() == [0, 2]


def test_no_fragments_and_empty_ones():
    assert len(assemble([], TENSORS)[0]) == 0
    table, packs = assemble([Fragment(rank=0, plan_key=b"", packs=(pack("p"),))], TENSORS)
    assert len(table) == 0
    assert table.first.tolist() == [0] * 7
    assert packs == ()


def one_chunk(*, tensor=0, tile=0, partial=(), rank=1):
    good = FragmentChunks.of(
        tensor=[1, tensor],
        tile=[0, tile],
        digest=[b"x" * 32] * 2,
        pack=[0, 0],
        offset=[0, 0],
        length=[1, 1],
        codec=[0, 0],
        partial=[(1, box) for box in partial],
    )
    return Fragment(rank=rank, plan_key=b"", chunks=good, packs=(pack("p"),))


@pytest.mark.parametrize(
    ("chunk", "says"),
    [
        ({"tensor": 6}, "beyond the 6"),
        ({"tensor": 2**32 - 1}, "beyond the 6"),
        ({"tensor": 2}, "tile that its tensor does not have"),
        ({"tensor": 3}, "tile that its tensor does not have"),
        ({"tile": 6}, "tile that its tensor does not have"),
        ({"partial": [Box((0,), (1,))]}, "number of dims"),
        ({"partial": [Box((0, 0, 0), (1, 1, 1))]}, "number of dims"),
        ({"partial": [Box((4, 0), (1, 1))]}, "no proper part"),
        ({"partial": [Box((0, 2), (1, 2))]}, "no proper part"),
        ({"partial": [Box((0, 0), (0, 1))]}, "no proper part"),
        ({"partial": [Box((2**63, 0), (1, 1))]}, "no proper part"),
    ],
)
def test_chunks_that_are_of_nothing_name_the_rank(chunk, says):
    fragments = [one_chunk(rank=4, tensor=5), one_chunk(rank=7, **chunk), one_chunk(rank=2, tensor=5, tile=1)]
    with pytest.raises(CorruptionError, match=says) as caught:
        assemble(fragments, TENSORS)
    assert "fragment of rank 7" in caught.value.message
    assert caught.value.context["rank"] == 7


def test_packs_of_two_sizes_name_the_rank():
    other = dataclasses.replace(one_chunk(rank=5), packs=(pack("p", 11),))
    with pytest.raises(CorruptionError, match=r"rank 5.* has 11 bytes, another rank 10000"):
        assemble([one_chunk(rank=0), other], TENSORS)


def test_agreement_of_equal_ranks():
    fragments = [Fragment(rank=r, plan_key=b"k", replicas={0: b"a" * 32}) for r in (2, 0, 1)]
    check_agreement(fragments, TENSORS, 3)


def test_all_disagreements_are_listed_with_the_ranks_on_each_side():
    fragments = [
        Fragment(
            rank=r,
            plan_key=b"k" if r < 3 else b"old",
            replicas={0: bytes([r // 2]) * 32, 1: b"same" * 8, **({4: bytes([r]) * 32} if r != 2 else {})},
        )
        for r in (0, 1, 2, 3, 3)
    ]
    with pytest.raises(MismatchError) as caught:
        check_agreement(fragments, TENSORS, 5)
    assert list(caught.value.problems) == [
        "rank 4 of 5 reported nothing",
        "rank 3 reported twice or is none of 5 ranks",
        "the ranks followed different plans: ranks 0-2: 6b; rank 3: 6f6c64",
        "'a': the copies differ: ranks 0-1: 000000000000; ranks 2-3: 010101010101",
        "'c': the copies differ: rank 0: 000000000000; rank 1: 010101010101; rank 3: 030303030303",
    ]


def test_many_different_copies_make_one_short_line():
    fragments = [Fragment(rank=r, plan_key=b"k", replicas={0: r.to_bytes(32, "big")}) for r in range(500)]
    with pytest.raises(MismatchError) as caught:
        check_agreement(fragments, TENSORS, 500)
    (line,) = caught.value.problems
    assert "(500 different ones)" in line
    assert len(line) < 500


def test_a_replica_of_no_tensor_is_refused():
    with pytest.raises(CorruptionError, match="tensor 6 of 6"):
        check_agreement([Fragment(rank=0, plan_key=b"", replicas={6: b"x" * 32})], TENSORS, 1)


def test_half_a_million_chunks_of_a_thousand_ranks_assemble_fast():
    num_tensors, tiles, world_size = 500, 1000, 1024
    tensors = [TensorRecord((i,), "bfloat16", (4096, 1024 * tiles), (4096, 1024)) for i in range(num_tensors)]
    owner = np.random.default_rng(0).permutation(num_tensors * tiles)
    fragments = []
    for rank, rows in enumerate(np.array_split(owner, world_size)):
        num, half = len(rows), np.flatnonzero(rows % 2 == 0)
        boxes = np.zeros((len(half), 4), np.uint64)
        boxes[:, 1], boxes[:, 2], boxes[:, 3] = rows[half] % tiles * 1024, 4096, 512
        chunks = FragmentChunks(
            tensor=(rows // tiles).astype(np.uint32),
            tile=(rows % tiles).astype(np.uint32),
            digest=np.zeros((num, 32), np.uint8),
            pack=(rows % 4).astype(np.uint32),
            offset=np.zeros(num, np.uint64),
            length=np.ones(num, np.uint32),
            codec=np.zeros(num, np.uint8),
            partial_row=half.astype(np.uint64),
            partial_ndim=np.full(len(half), 2, np.uint8),
            partial_box=boxes.reshape(-1),
        )
        fragments.append(
            Fragment(rank=rank, plan_key=b"", chunks=chunks, packs=tuple(pack(f"{rank}.{i}") for i in range(4)))
        )
    began = time.process_time()
    table, packs = assemble(fragments, tensors)
    assert time.process_time() - began < 4  # 0.4 on a machine with nothing else to do
    assert len(table) == num_tensors * tiles
    assert len(packs) == 4 * world_size
    assert np.array_equal(table.tile, np.tile(np.arange(tiles), num_tensors))
    assert np.array_equal(table.partial_row, np.arange(0, num_tensors * tiles, 2))
