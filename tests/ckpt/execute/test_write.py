from __future__ import annotations

import asyncio
import threading
import time
import uuid

import numpy as np
import pytest
import torch

from vescale_ckpt.errors import InternalError, NoSpaceError
from vescale_ckpt.execute.dedup import DedupIndex, Location
from vescale_ckpt.execute.write import WriteOptions, Writer
from vescale_ckpt.format.records import PackRecord, TensorRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape
from vescale_ckpt.plan.parts import Part
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import Slab, StagedPart
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.digest import digest, digest_parts
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, decode_chunk, read_footer
from vescale_storage.wrappers.count import CountingBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.wrapper import WrapperBackend

KIB = 1024


def storage():
    return MemoryBackend(uuid.uuid4().hex)


def record_of(tensor, name="w", tile=None):
    shape = tuple(tensor.shape)
    return TensorRecord(
        (name,), str(tensor.dtype).removeprefix("torch."), shape, tile or tile_shape(shape, tensor.itemsize)
    )


def staged(tensors, *, stored=True, slab=None):
    """Return whole tensors as parts, in place."""
    return [
        StagedPart(Part(i, Box.whole(tuple(t.shape)), stored=stored), t.view(_integer(t)), slab)
        for i, t in enumerate(tensors)
    ]


def _integer(tensor):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]


def write(backend, tensors, *, tile=None, index=None, pool=None, parts=None, compared=frozenset(), **options):
    records = [record_of(t, f"w{i}", tile) for i, t in enumerate(tensors)]
    pool = pool or BufferPool(64 * KIB, 6)
    writer = Writer(backend, records, index or DedupIndex([]), pool, WriteOptions(**options))
    return writer.write(staged(tensors) if parts is None else parts, compared)


def content(backend, written, row):
    """Return the raw bytes of a chunk, from storage."""
    pack = written.packs[written.pack[row]]
    data = loop.run(backend.get(pack_key(pack.name)))
    assert len(data) == pack.size_bytes
    return data[written.offset[row] : written.offset[row] + written.length[row]]


def check(backend, written, tensors, tile=None):
    """Check that the chunks are those of the tensors, by tile, and that every pack is whole."""
    row = 0
    partial = dict(written.partial)
    for i, tensor in enumerate(tensors):
        record = record_of(tensor, tile=tile)
        for index, box in TileGrid(record.shape, record.tile).cut(Box.whole(record.shape)):
            raw = tensor[box.slices].contiguous().view(torch.uint8).numpy().tobytes()
            assert (written.tensor[row], written.tile[row]) == (i, index)
            assert written.digest[row] == digest(raw)
            assert row not in partial
            assert bytes(decode_chunk(content(backend, written, row), Codec(written.codec[row]), len(raw))) == raw
            row += 1
    assert row == len(written.tile) == len(written.length)
    for pack in written.packs:
        entries = loop.run(read_footer(backend, pack.name, pack.size_bytes))
        assert len(entries) >= 1


def random(shape, seed=0, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32)).to(dtype)


def names(written):
    return [pack.name for pack in written.packs]


def test_every_chunk_is_where_the_columns_say():
    backend = storage()
    tensors = [random((300, 500)), random((7, 5), 1), torch.arange(3)]
    written = write(backend, tensors)
    check(backend, written, tensors)
    assert written.bytes_total == sum(t.nbytes for t in tensors)
    assert written.bytes_deduplicated == 0
    assert written.bytes_stored == written.bytes_total
    assert written.bytes_put == sum(pack.size_bytes for pack in written.packs)
    assert written.new_packs == set(names(written))


def test_nothing_to_write_is_no_pack():
    written = write(storage(), [])
    assert (written.packs, written.tile, written.bytes_put) == ([], [], 0)


def test_the_parts_of_a_tile_carry_their_boxes():
    backend = storage()
    tensor = random((40, 30))
    record = record_of(tensor, tile=(20, 30))
    boxes = [Box((0, 0), (20, 30)), Box((20, 0), (20, 10)), Box((20, 10), (20, 20))]
    parts = [StagedPart(Part(0, box, stored=True), tensor[box.slices].view(torch.int32), None) for box in boxes]
    written = Writer(backend, [record], DedupIndex([]), BufferPool(4096, 3), WriteOptions()).write(parts)
    assert written.partial == [(1, boxes[1]), (2, boxes[2])]
    for row, box in enumerate(boxes):
        assert content(backend, written, row) == tensor[box.slices].contiguous().numpy().tobytes()


# ---- dedup


def test_equal_chunks_of_one_save_are_stored_once():
    backend = storage()
    tensors = [torch.zeros(256, 256), torch.zeros(256, 256), random((64, 64)), random((64, 64))]
    written = write(backend, tensors, tile=(64, 64))
    check(backend, written, tensors, tile=(64, 64))
    assert written.bytes_stored == 2 * 64 * 64 * 4
    assert written.bytes_deduplicated == written.bytes_total - written.bytes_stored


class Known(DedupIndex):
    """An index of given places."""

    def __init__(self, places):
        super().__init__([])
        self.places = places

    def find(self, name):
        return self.places.get(name)


def test_chunks_that_a_base_has_cost_nothing_and_keep_their_place():
    backend = storage()
    old, new = random((64, 64)), random((64, 64), 1)
    first = write(backend, [old])
    place = Location(first.packs[0], first.offset[0], first.length[0], first.codec[0])
    counted = CountingBackend(backend)
    written = write(counted, [new, old, old], index=Known({first.digest[0]: place}))
    check(backend, written, [new, old, old])
    assert written.bytes_deduplicated == 2 * old.nbytes
    assert written.new_packs == {names(written)[0]}
    assert written.packs[1] == first.packs[0], "a pack that is referred to twice is listed once"
    assert counted.counts.up_bytes == written.bytes_put
    everything = write(backend, [old], index=Known({first.digest[0]: place}))
    assert (everything.packs, everything.bytes_put) == (first.packs, 0)


def test_a_base_whose_pack_is_gone_is_no_reason_to_lose_the_save():
    """It would refer to what is not there; the commit refuses that, and every later save as well."""
    backend = storage()
    tensor = random((64, 64))
    first = write(backend, [tensor])
    place = Location(first.packs[0], first.offset[0], first.length[0], first.codec[0])
    loop.run(backend.delete(pack_key(first.packs[0].name)))
    written = write(backend, [tensor, tensor], index=Known({first.digest[0]: place}))
    check(backend, written, [tensor, tensor])
    assert written.bytes_stored == tensor.nbytes
    cut = Location(PackRecord(first.packs[0].name, first.packs[0].size_bytes + 1), *(place.offset, place.length, 0))
    check(backend, write(backend, [tensor], index=Known({first.digest[0]: cut})), [tensor])


# ---- packs and memory


def test_packs_are_closed_near_their_size():
    backend = storage()
    tensor = random((1024, 1024))
    written = write(backend, [tensor], tile=(64, 64), pack_bytes=256 * KIB, pool=BufferPool(64 * KIB, 16))
    check(backend, written, [tensor], tile=(64, 64))
    assert len(written.packs) > 8
    assert all(pack.size_bytes <= (256 + 64 + 4) * KIB for pack in written.packs)
    assert all(pack.size_bytes >= 256 * KIB for pack in written.packs[:-1])


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a_small_pool_is_enough_for_any_state(num_blocks):
    backend = storage()
    pool = BufferPool(64 * KIB, num_blocks)
    tensors = [random((512, 512)), random((100, 100), 1), random((512, 512), 2)]
    written = write(backend, tensors, tile=(64, 64), pool=pool)
    check(backend, written, tensors, tile=(64, 64))
    assert pool.peak_bytes <= num_blocks * 64 * KIB


def test_a_chunk_larger_than_a_block_gets_memory_of_its_own():
    backend = storage()
    pool = BufferPool(4 * KIB, 2)
    tensors = [random((3, 3)), random((64, 64), 1), random((3, 3), 2)]
    check(backend, write(backend, tensors, pool=pool), tensors)
    assert pool.peak_bytes <= 8 * KIB


def test_all_buffers_and_slabs_are_given_back():
    returned = []
    slab = Slab(torch.empty(0), returned.append)
    tensors = [random((100, 100)), random((100, 100), 1)]
    slab.hold()
    pool = BufferPool(64 * KIB, 3)
    write(storage(), tensors, parts=staged(tensors, slab=slab), pool=pool)
    assert len(returned) == 1
    assert [pool.try_take() is not None for _ in range(4)] == [True, True, True, False]


class Slow(WrapperBackend):
    """Puts take their time; counts how many are under way at once."""

    def __init__(self, inner, seconds):
        super().__init__(inner)
        self.seconds, self.now, self.most = seconds, 0, 0

    async def put_if_absent(self, key, payload):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.seconds)
            await self.inner.put_if_absent(key, payload)
        finally:
            self.now -= 1


def test_so_many_packs_are_in_flight_and_no_more():
    backend = Slow(storage(), 0.02)
    tensor = random((512, 512))
    options = {"tile": (64, 64), "pack_bytes": 64 * KIB, "num_puts": 3, "pool": BufferPool(64 * KIB, 16)}
    written = write(backend, [tensor], **options)
    check(backend, written, [tensor], tile=(64, 64))
    assert 2 <= backend.most <= 4


def test_a_retry_makes_the_same_packs_however_fast_storage_is():
    """Pack names are what a retry finds its own bytes by, so the cut into packs may not depend on the time."""
    tensors = [random((512, 512)), random((300, 300), 1)]
    found = []
    for seconds in (0.0, 0.03):
        backend = Slow(storage(), seconds)
        pool = BufferPool(64 * KIB, 6)
        found.append(names(write(backend, tensors, tile=(64, 64), pack_bytes=128 * KIB, pool=pool)))
    assert found[0] == found[1]
    counted = CountingBackend(backend)
    again = write(counted, tensors, tile=(64, 64), pack_bytes=128 * KIB, pool=BufferPool(64 * KIB, 6))
    assert names(again) == found[0]
    assert counted.counts.up_bytes == 0, "what is there is found and not sent again"


def test_a_pack_that_a_failed_attempt_left_cut_is_written_again():
    backend = storage()
    tensor = random((64, 64))
    first = write(backend, [tensor])
    key = pack_key(first.packs[0].name)
    loop.run(backend.put(key, [loop.run(backend.get(key))[:-1]]))
    check(backend, write(backend, [tensor]), [tensor])


# ---- codec


def test_what_shrinks_is_compressed_and_what_does_not_is_stored_raw():
    backend = storage()
    smooth = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64)
    noise = torch.from_numpy(np.random.default_rng(3).integers(0, 2**31, (64, 64), dtype=np.int32))
    tensors = [smooth, noise]
    written = write(backend, tensors, codec=Codec.ZSTD)
    check(backend, written, tensors)
    assert [Codec(codec) == Codec.RAW for codec in written.codec] == [False, True]
    assert written.length[0] < smooth.nbytes / 2
    assert written.bytes_stored < written.bytes_total


def test_the_codec_does_not_change_a_chunks_name():
    tensor = torch.zeros(64, 64)
    assert write(storage(), [tensor]).digest == write(storage(), [tensor], codec=Codec.ZSTD).digest


# ---- comparing


def test_a_copy_that_is_only_compared_gives_the_digest_that_its_writer_gives():
    tensor = random((256, 256))
    writes = write(storage(), [tensor], tile=(64, 64), compared=frozenset({0}))
    backend = storage()
    only = write(backend, [tensor], tile=(64, 64), parts=staged([tensor], stored=False), compared=frozenset({0}))
    assert writes.compared == only.compared == {0: digest_parts(writes.digest)}
    assert (only.tile, only.packs, only.bytes_total, only.bytes_put) == ([], [], 0, 0)
    other = tensor.clone()
    other[200, 200] += 1
    assert write(storage(), [other], tile=(64, 64), compared=frozenset({0})).compared != writes.compared


def test_copies_are_compared_by_one_tile_where_that_is_enough():
    tensor, small = random((128, 64)), random((9, 9))
    compared = frozenset({0, 1})
    writes = write(storage(), [tensor, small], tile=(64, 64), compared=compared, compare_whole=False)
    assert writes.compared == {0: digest_parts([writes.digest[1]]), 1: digest_parts([writes.digest[2]])}
    elsewhere, there = tensor.clone(), tensor.clone()
    elsewhere[3, 3] += 1
    there[100, 3] += 1
    again = [
        write(storage(), [other, small], tile=(64, 64), compared=compared, compare_whole=False).compared
        for other in (elsewhere, there)
    ]
    assert again[0] == writes.compared
    assert again[1] != writes.compared


def test_the_order_in_which_tiles_come_does_not_matter_to_the_comparison():
    tensor = random((128, 64))
    tiles = [Box((0, 0), (64, 64)), Box((64, 0), (64, 64))]
    parts = [StagedPart(Part(0, box, stored=False), tensor[box.slices].view(torch.int32), None) for box in tiles]
    both = [
        write(storage(), [tensor], tile=(64, 64), parts=order, compared=frozenset({0})).compared
        for order in (parts, parts[::-1])
    ]
    assert both[0] == both[1]


# ---- failures


def test_an_error_of_storage_is_raised_after_nothing_touches_the_buffers_any_more():
    inner = storage()
    backend = FaultBackend(inner)
    rule = backend.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/", skip=2)
    tensor = random((512, 512))
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(NoSpaceError, match="disk full"):
        write(backend, [tensor], tile=(64, 64), pack_bytes=128 * KIB)
    assert rule.num_hit == 1
    assert {t.name for t in threading.enumerate()} - before == set(), "no worker is left"
    written = write(backend, [tensor], tile=(64, 64), pack_bytes=128 * KIB)
    check(inner, written, [tensor], tile=(64, 64))


def test_puts_in_flight_do_not_outlive_a_failure():
    inner = storage()
    backend = FaultBackend(Slow(inner, 60.0))
    backend.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
    began = time.monotonic()
    with pytest.raises(NoSpaceError, match="disk full"):
        write(backend, [random((512, 512))], tile=(64, 64), pack_bytes=128 * KIB)
    assert time.monotonic() - began < 10
    assert backend.inner.now == 0, "none is under way"


def test_an_error_of_staging_ends_the_writing():
    tensors = [random((64, 64))]

    def parts():
        yield from staged(tensors)
        raise InternalError("staging failed")

    backend = storage()
    with pytest.raises(InternalError, match="staging failed"):
        write(backend, tensors, parts=parts())


def test_buffers_that_never_come_back_are_our_bug_and_no_endless_wait():
    pool = BufferPool(64 * KIB, 1)
    pool.try_take()
    with pytest.raises(InternalError, match="not by this save"):
        write(storage(), [random((64, 64))], pool=pool)
