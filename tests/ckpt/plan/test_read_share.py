from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ckpt.plan.test_load_plan import SHARDS, record, stored
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.layout.placement import Shard
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.plan.read_cost import ReadCost
from vescale_ckpt.plan.read_share import NOBODY, raw_bytes_of, share_reads
from vescale_storage.codec import Codec

PLENTY = 1 << 40


def sharded(shape, dim, world_size):
    layout = Layout((world_size,), (Shard(dim),))
    return [[span.box for span in spans(layout, shape, (rank,))] for rank in range(world_size)]


def needed_by(manifest, boxes):
    return [
        np.array([need.row for need in chunks_needed(manifest, [Want(0, box) for box in held])], dtype=np.int64)
        for held in boxes
    ]


def shares(manifest, needed, round_bytes=PLENTY, ranks=None):
    chosen = range(len(needed)) if ranks is None else ranks
    return {rank: share_reads(manifest, needed, rank=rank, round_bytes=round_bytes) for rank in chosen}


def check(manifest, needed, every, round_bytes=PLENTY):
    """Check that each row is read once by a rank that needs it and goes to all others that do; return bytes read."""
    count = np.bincount(np.concatenate(needed), minlength=len(manifest.chunks))
    reader = every[min(every)].reader
    raw = raw_bytes_of(manifest, np.arange(len(manifest.chunks)))
    assert np.array_equal(reader == NOBODY, count == 0)
    assert len({len(share.rounds) for share in every.values()}) == 1
    for rank, share in every.items():
        assert np.array_equal(share.reader, reader)
        assert np.array_equal(share.own, [row for row in needed[rank] if count[row] == 1])
        assert (reader[share.own] == rank).all()
        rows = np.concatenate([turn.rows for turn in share.rounds] or [np.empty(0, dtype=np.int64)])
        assert sorted(rows.tolist()) == [row for row in needed[rank].tolist() if count[row] > 1]
        for number, turn in enumerate(share.rounds):
            assert np.array_equal(turn.rows, np.sort(turn.rows))
            assert np.array_equal(turn.raw_bytes, raw[turn.rows])
            assert np.array_equal(turn.reader, reader[turn.rows])
            assert np.array_equal(turn.to_rank, np.sort(turn.to_rank))
            _check_sends(needed, every, rank, number)
            uses = turn.raw_bytes[turn.reader != rank].sum() + turn.raw_bytes[turn.reader == rank].sum()
            uses += turn.raw_bytes[turn.to_place].sum()
            assert uses <= round_bytes or _is_one_row(every, number, needed)
    return [int(manifest.chunks.length[reader == rank].sum()) for rank in range(len(needed))]


def _check_sends(needed, every, rank, number):
    """What this rank sends to another is what the other awaits from it, in the same order."""
    turn = every[rank].rounds[number]
    for other in range(len(needed)):
        sent = turn.rows[turn.to_place[turn.to_rank == other]]
        wanted = [] if other == rank else turn.rows[(turn.reader == rank) & np.isin(turn.rows, needed[other])]
        assert sent.tolist() == list(wanted)
        if other in every and other != rank:
            theirs = every[other].rounds[number]
            assert sent.tolist() == theirs.rows[theirs.reader == rank].tolist()


def _is_one_row(every, number, needed):
    if len(every) < len(needed):
        return False
    return len({int(row) for share in every.values() for row in share.rounds[number].rows}) == 1


def test_what_one_rank_needs_it_reads_without_the_others():
    manifest = stored([record(shape=(64, 64), tile=(8, 8))], [[Box.whole((64, 64))]])
    needed = needed_by(manifest, sharded((64, 64), 0, 8))
    every = shares(manifest, needed)
    assert all(share.rounds == () for share in every.values())
    assert check(manifest, needed, every) == [64 * 64 * 4 // 8] * 8


def test_one_rank_alone_reads_all():
    manifest = stored([record(tile=(8, 8))], [[Box.whole((40, 30))]])
    needed = needed_by(manifest, [[Box.whole((40, 30))]])
    assert check(manifest, needed, shares(manifest, needed)) == [4800]


def test_copies_are_read_once_and_evenly():
    manifest = stored([record(shape=(640, 64), tile=(8, 8))], [[Box.whole((640, 64))]])
    needed = needed_by(manifest, [[Box.whole((640, 64))]] * 5)
    loads = check(manifest, needed, shares(manifest, needed))
    assert max(loads) == min(loads) == 640 * 64 * 4 // 5


def test_a_rank_that_reads_much_alone_is_spared():
    manifest = stored([record(shape=(80, 64), tile=(8, 64))], [[Box.whole((80, 64))]])
    needed = needed_by(manifest, [[Box.whole((80, 64))], [Box((64, 0), (16, 64))], []])
    loads = check(manifest, needed, shares(manifest, needed))
    assert loads == [8 * 2048, 2 * 2048, 0], "rank 0 alone needs eight chunks, so rank 1 reads the two that both need"


@pytest.mark.parametrize(("dim", "world_size"), [(0, 3), (1, 5), (0, 7), (1, 16), (0, 64)])
def test_edges_that_are_no_tile_lines_are_shared(dim, world_size):
    manifest = stored([record(shape=(100, 96), tile=(16, 16))], [[Box.whole((100, 96))]])
    needed = needed_by(manifest, sharded((100, 96), dim, world_size))
    every = shares(manifest, needed)
    loads = check(manifest, needed, every)
    assert sum(loads) == 100 * 96 * 4
    assert every[0].rounds


@pytest.mark.parametrize(("round_bytes", "num_rounds"), [(1, 16), (3 * 1024, 16), (7 * 1024, 6), (PLENTY, 1)])
def test_rounds_are_bounded_by_what_any_rank_holds_but_for_a_single_chunk(round_bytes, num_rounds):
    manifest = stored([record(shape=(64, 64), tile=(16, 16))], [[Box.whole((64, 64))]])
    needed = needed_by(manifest, [[Box.whole((64, 64))]] * 3)
    every = shares(manifest, needed, round_bytes)
    check(manifest, needed, every, round_bytes)
    assert len(every[0].rounds) == num_rounds


def test_ranks_get_on_side_by_side_and_not_one_after_another():
    """Stages of a pipeline, each of two replicas: the rounds are as many as for one stage alone."""
    manifest = stored([record(shape=(1024, 64), tile=(16, 64))], [[Box.whole((1024, 64))]])
    stages = [[Box((rank // 2 * 128, 0), (128, 64))] for rank in range(16)]
    needed = needed_by(manifest, stages)
    every = shares(manifest, needed, round_bytes=2 * 3 * 4096)
    check(manifest, needed, every, 2 * 3 * 4096)
    alone = shares(manifest, needed[:2], round_bytes=2 * 3 * 4096)
    assert len(every[0].rounds) == len(alone[0].rounds) == 2


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
    assert all(share.own.size == 0 and share.rounds == () for share in every.values())
    assert (every[0].reader == NOBODY).all()


def test_a_thousand_ranks_share_what_each_of_them_would_read():
    shape = (4096, 48)
    manifest = stored([record(shape=shape, tile=(64, 16))], [[Box.whole(shape)]])
    needed = needed_by(manifest, sharded(shape, 0, 1024))
    some = shares(manifest, needed, ranks=range(0, 1024, 93))
    loads = check(manifest, needed, some)
    assert sum(loads) == 4096 * 48 * 4, "a sixteenth of what they would read if each read what it needs"
    assert max(loads) == 64 * 16 * 4


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 8),
    st.data(),
    st.sampled_from([1, 2000, 5000, 20_000, PLENTY]),
)
def test_any_needs_of_any_world(num_ranks, data, round_bytes):
    manifest = stored(
        [record(shape=(48, 40), tile=(8, 8))],
        [[Box.whole((48, 40))]],
        length=lambda n: n // 3 + n % 7,
        codec=Codec.ZSTD,
    )
    rows = st.lists(st.integers(0, len(manifest.chunks) - 1), unique=True).map(sorted)
    needed = [np.array(data.draw(rows), dtype=np.int64) for _ in range(num_ranks)]
    every = shares(manifest, needed, round_bytes)
    loads = check(manifest, needed, every, round_bytes)
    alone = [int(manifest.chunks.length[every[r].own].sum()) for r in range(num_ranks)]
    largest = int(manifest.chunks.length.max())
    same = {tuple(rows.tolist()) for rows in needed}
    if len(same) == 1:
        assert max(loads) - min(loads) <= largest
    assert all(load >= own for load, own in zip(loads, alone, strict=True))


def test_decoded_bytes_are_those_of_the_boxes():
    records = [record("a", (40, 30), tile=(7, 30)), record("b", (9, 9), tile=(4, 4))]
    manifest = stored(records, [[Box((0, 0), (17, 30)), Box((17, 0), (23, 30))], [Box.whole((9, 9))]], codec=Codec.ZSTD)
    rows = np.arange(len(manifest.chunks))
    expected = [
        int(n)
        for tensor, made in enumerate(records)
        for n in manifest.chunks.raw_bytes(made, manifest.chunks.rows(tensor), 4)
    ]
    assert raw_bytes_of(manifest, rows).tolist() == expected
    for some in itertools.islice(itertools.combinations(rows.tolist(), 3), 0, None, 37):
        assert raw_bytes_of(manifest, np.array(some)).tolist() == [expected[row] for row in some]
    assert raw_bytes_of(manifest, rows[:0]).tolist() == []


def test_decoded_sizes_do_not_depend_on_the_codec():
    boxes = [SHARDS, [Box.whole((40, 30))]]
    records = [record("a", tile=(10, 10)), record("b", tile=(10, 10))]
    raw = stored(records, boxes)
    packed = stored(records, boxes, length=lambda n: n // 2, codec=Codec.ZSTD)
    rows = np.arange(len(raw.chunks))
    assert raw_bytes_of(packed, rows).tolist() == raw_bytes_of(raw, rows).tolist() == raw.chunks.length.tolist()
    assert raw_bytes_of(packed, rows[3:7]).tolist() == raw.chunks.length[3:7].tolist()


NEVER = ReadCost(rank_bytes_per_second=1e12, storage_bytes_per_second=math.inf, link_bytes_per_second=1.0)


def test_where_exchanging_is_slower_all_read_for_themselves():
    manifest = stored([record(shape=(640, 64), tile=(8, 8))], [[Box.whole((640, 64))]])
    needed = needed_by(manifest, [[Box.whole((640, 64))], [Box((0, 0), (320, 64))], []])
    for rank, rows in enumerate(needed):
        share = share_reads(manifest, needed, rank=rank, round_bytes=PLENTY, cost=NEVER)
        assert np.array_equal(share.own, rows)
        assert share.rounds == ()
        assert (share.reader == 0).all(), "the lowest of those that read a row proves its pack"


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_row_is_read_by_all_that_need_it_or_exchanged_and_all_ranks_agree(data):
    """Sets of few ranks read, sets of many exchange."""
    shape, world_size = (48, 32), data.draw(st.integers(2, 6))
    manifest = stored([record(shape=shape, tile=(8, 8))], [[Box.whole(shape)]])
    rows = np.arange(len(manifest.chunks))
    needed = [rows[np.array(data.draw(st.lists(st.booleans(), min_size=24, max_size=24)))] for _ in range(world_size)]
    # No number of ranks makes the two ways cost the same, which rounding would decide.
    cost = ReadCost(rank_bytes_per_second=2.0, storage_bytes_per_second=6.0, link_bytes_per_second=1.15)
    every = [share_reads(manifest, needed, rank=rank, round_bytes=PLENTY, cost=cost) for rank in range(world_size)]
    assert len({len(share.rounds) for share in every}) == 1
    for row in rows.tolist():
        who = [rank for rank in range(world_size) if row in needed[rank]]
        own = [rank for rank in who if row in every[rank].own]
        if not who:
            assert every[0].reader[row] == NOBODY
        elif len(who) > 1 and cost.shares(len(who), 1):
            assert own == []
            turns = [turn for turn in every[who[0]].rounds if row in turn.rows]
            assert len(turns) == 1
            assert turns[0].reader[turns[0].rows == row] == every[who[0]].reader[row]
            assert every[who[0]].reader[row] in who
        else:
            assert own == who
            assert every[0].reader[row] == who[0]
