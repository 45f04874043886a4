from __future__ import annotations

import threading
import uuid

import numpy as np
import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.errors import AccessDeniedError, CorruptionError, ObjectNotFoundError
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.execute.write import WriteOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import pack_key
from vescale_storage.pack import Codec, footer_bytes
from vescale_storage.wrappers.cache import CacheBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.mirror import MirrorBackend


class Stored:
    """Some tensors in one snapshot, and what a reader delivers of them."""

    def __init__(self, tensors, *, bases=(), backend=None, **options):
        self.backend = backend or MemoryBackend(uuid.uuid4().hex)
        self.tensors = tensors
        spreads = [simulated.replicated(name, tuple(t.shape), 1, full=t, dtype=t.dtype) for name, t in tensors.items()]
        write = WriteOptions(**({"pack_bytes": 1 << 20} | options))
        self.manifest = simulated.save(self.backend, spreads, 1, options=write, bases=bases).manifest
        self.faults = FaultBackend(self.backend)

    def needs(self, name=None, box=None):
        wants = [
            Want(self.manifest.by_path[n,], box or Box.whole(tuple(t.shape)))
            for n, t in self.tensors.items()
            if name in {None, n}
        ]
        return chunks_needed(self.manifest, wants)

    def reader(self, **options):
        return Reader(self.faults, self.manifest, ReadOptions(**options))

    def read(self, needs=None, whole_packs=(), **options):
        """Check every delivered chunk against the tensors and return the reader."""
        needs = self.needs() if needs is None else needs
        got, lock = [], threading.Lock()
        names = list(self.tensors)

        def deliver(need, raw):
            tensor = self.tensors[names[need.tensor]]
            part = tensor[need.box.slices] if need.box.shape else tensor
            assert (raw.dtype, raw.ndim) == (torch.uint8, 1)
            expected = part.reshape(-1).contiguous()
            assert torch.equal(raw.view(tensor.dtype).view(torch.uint8), expected.view(torch.uint8))
            with lock:
                got.append(need.row)

        reader = self.reader(**options)
        reader.read(needs, deliver, whole_packs)
        assert sorted(got) == [need.row for need in needs]
        return reader

    def key(self, pack=0):
        return pack_key(self.manifest.packs[pack].name)

    def put(self, change, pack=0):
        """Replace a pack by what ``change`` makes of its bytes."""
        loop.run(
            self.backend.put(self.key(pack), [bytes(change(bytearray(loop.run(self.backend.get(self.key(pack))))))])
        )


def random(shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(shape, dtype=np.float32))


def flip(at):
    def change(data):
        data[at] ^= 0x40
        return data

    return change


@pytest.fixture
def stored():
    return Stored({"w": random((700, 500)), "s": torch.tensor(3), "b": random((7,), 1) > 0.5, "c": random((5, 3), 2)})


def test_everything_is_delivered_once_and_counted(stored):
    reader = stored.read()
    assert reader.counters.bytes_read == sum(t.nbytes for t in stored.tensors.values())
    assert reader.counters.chunks == len(stored.manifest.chunks)
    assert (reader.counters.reread, reader.counters.bytes_footers) == (0, 0)


def test_nothing_needed_is_no_request(stored):
    reader = stored.reader()
    reader.read([], lambda *_: pytest.fail("delivered"))
    assert reader.counters.requests == len(stored.faults.operations) == 0


def test_neighbours_are_read_in_one_request(stored):
    assert stored.read().counters.requests == len(stored.manifest.packs)


@pytest.mark.parametrize("span_bytes", [1, 300_000, 600_000])
def test_a_request_is_no_longer_than_asked_for_but_for_one_chunk(stored, span_bytes):
    sizes = []
    inner = stored.backend.get_into

    async def get_into(key, offset, out):
        sizes.append(len(out))
        await inner(key, offset, out)

    stored.backend.get_into = get_into
    stored.read(span_bytes=span_bytes)
    longest = int(stored.manifest.chunks.length.max())
    assert all(size <= max(span_bytes, longest) for size in sizes)
    assert span_bytes == 600_000 or len(sizes) >= 5


def test_gaps_are_not_read_unless_it_is_asked_for(stored):
    needs = stored.needs()[::2]
    exact = sum(int(stored.manifest.chunks.length[need.row]) for need in needs)
    assert stored.read(needs).counters.bytes_read == exact
    along = stored.read(needs, gap_bytes=1 << 20).counters
    assert along.bytes_read > exact, "gaps that are read are counted"
    assert along.requests < len(needs)


@pytest.mark.parametrize("num_workers", [1, 2, 16])
def test_any_number_of_threads_reads_the_same(stored, num_workers):
    before = {thread.name for thread in threading.enumerate()}
    stored.read(num_workers=num_workers, span_bytes=1)
    assert {thread.name for thread in threading.enumerate()} - before == set()


def test_chunks_at_odd_offsets_are_aligned_for_their_items():
    odd = {"a": torch.arange(3, dtype=torch.uint8), "d": random((5,)).double(), "e": torch.arange(1, dtype=torch.uint8)}
    odd["f"] = torch.randn(3, dtype=torch.complex128)
    stored = Stored(odd)
    assert any(int(offset) % 8 for offset in stored.manifest.chunks.offset)
    stored.read()


def test_compressed_chunks_are_decoded():
    noise = torch.from_numpy(np.random.default_rng(3).integers(0, 2**31, (100, 100), dtype=np.int32))
    stored = Stored({"w": torch.arange(300_000.0).reshape(600, 500), "n": noise}, codec=Codec.ZSTD)
    assert set(stored.manifest.chunks.codec.tolist()) == {Codec.RAW, Codec.ZSTD}
    assert stored.read().counters.bytes_read < 1_240_000


# ---- damage


def test_a_chunk_that_arrives_damaged_once_is_read_again(stored):
    rule = stored.faults.corrupt("get_into", 1000, prefix="packs/")
    reader = stored.read()
    assert (rule.num_hit, reader.counters.reread) == (1, 1)


def test_a_read_that_is_short_in_silence_is_read_again(stored, monkeypatch):
    fresh = Reader._buffer
    monkeypatch.setattr(Reader, "_buffer", lambda self, size: fresh(self, size).zero_())  # no old bytes that fit
    rule = stored.faults.truncate("get_into", 10, prefix="packs/")
    assert stored.read().counters.reread == 1
    assert rule.num_hit == 1


def test_a_chunk_that_is_damaged_twice_is_an_error_that_says_all(stored):
    rule = stored.faults.corrupt("get_into", 1000, prefix="packs/", times=2)
    with pytest.raises(CorruptionError) as caught:
        stored.read(num_workers=1)
    assert rule.num_hit == 2
    error = caught.value
    need = stored.needs("w")[0]
    assert error.context == {"fqn": "w", "box": need.box, "key": stored.key()}
    for part in (
        "cannot load 'w'",
        str(need.box),
        "run@1",
        f"at offset {int(stored.manifest.chunks.offset[need.row])} of",
    ):
        assert part in str(error)
    assert "on two reads" in str(error)


def test_every_damaged_chunk_is_found_whichever_it_is(stored):
    chunks = stored.manifest.chunks
    names = [record.path[0] for record in stored.manifest.tensors]
    for need in stored.needs():
        pack, at = int(chunks.pack[need.row]), int(chunks.offset[need.row]) + int(chunks.length[need.row]) - 1
        stored.put(flip(at), pack)
        with pytest.raises(CorruptionError) as caught:
            stored.read()
        assert caught.value.context["fqn"] == names[need.tensor]
        assert caught.value.context["box"] == need.box
        stored.put(flip(at), pack)
    stored.read()


def test_nothing_damaged_is_ever_delivered(stored):
    chunks = stored.manifest.chunks
    victim = stored.needs("w")[1]
    stored.put(flip(int(chunks.offset[victim.row])), int(chunks.pack[victim.row]))
    delivered = []
    with pytest.raises(CorruptionError):
        stored.reader().read(stored.needs(), lambda need, _: delivered.append(need.row))
    assert victim.row not in delivered


def test_damaged_compressed_chunks_are_found_too():
    stored = Stored({"w": torch.arange(300_000.0).reshape(600, 500)}, codec=Codec.ZSTD)
    for at in (0, 5, int(stored.manifest.chunks.length[0]) - 1):
        stored.put(flip(at))
        with pytest.raises(CorruptionError, match="cannot load 'w'"):
            stored.read()
        stored.put(flip(at))


def test_a_pack_that_is_gone_is_named_with_what_it_held(stored):
    loop.run(stored.backend.delete(stored.key()))
    with pytest.raises(ObjectNotFoundError, match=r"cannot load run@1: .* - it holds parts of b, c, s and 1 more") as e:
        stored.read()
    assert e.value.context["key"] == stored.key()


def test_a_pack_that_is_cut_is_named_with_what_it_held(stored):
    last = max(stored.needs(), key=lambda need: int(stored.manifest.chunks.offset[need.row]))
    end = int(stored.manifest.chunks.offset[last.row] + stored.manifest.chunks.length[last.row])
    stored.put(lambda data: data[: end - 1])
    with pytest.raises(CorruptionError, match=r"cannot load run@1: .*it holds parts of") as caught:
        stored.read()
    assert caught.value.context["key"] == stored.key()


def test_other_errors_of_storage_come_as_they_are(stored):
    stored.faults.fail("get_into", AccessDeniedError("no rights"))
    with pytest.raises(AccessDeniedError, match="no rights"):
        stored.read()


def test_what_delivery_raises_ends_the_reading(stored):
    def deliver(need, raw):
        raise ValueError("cannot take it")

    with pytest.raises(ValueError, match="cannot take it"):
        stored.reader().read(stored.needs(), deliver)


# ---- tails


def all_packs(stored):
    return range(len(stored.manifest.packs))


def test_a_whole_pack_is_proved_with_the_request_that_reads_it(stored):
    counters = stored.read(whole_packs=all_packs(stored)).counters
    assert counters.requests == len(stored.manifest.packs)
    assert counters.bytes_footers == sum(
        footer_bytes(int((stored.manifest.chunks.pack == pack).sum())) for pack in all_packs(stored)
    )
    assert counters.bytes_read == sum(t.nbytes for t in stored.tensors.values()), "footers are counted apart"


def test_a_pack_of_which_nothing_is_needed_can_be_proved_too(stored):
    reader = stored.reader()
    reader.read([], lambda *_: pytest.fail("delivered"), all_packs(stored))
    assert reader.counters.bytes_footers > 0
    assert reader.counters.bytes_read == 0


def test_every_byte_of_a_footer_counts(stored):
    pack = len(stored.manifest.packs) - 1
    size = stored.manifest.packs[pack].size_bytes
    start = size - footer_bytes(int((stored.manifest.chunks.pack == pack).sum()))
    for at in range(start, size):
        stored.put(flip(at), pack)
        with pytest.raises(CorruptionError) as caught:
            stored.read([], whole_packs=[pack])
        assert stored.manifest.packs[pack].name in str(caught.value)
        stored.put(flip(at), pack)
    stored.read(whole_packs=all_packs(stored))


@pytest.mark.parametrize("lost", [1, 19, 20, 21, 60])
def test_a_pack_cut_in_its_footer_is_found_where_it_is_proved_whole(stored, lost):
    stored.put(lambda data: data[:-lost])
    with pytest.raises(CorruptionError, match=stored.manifest.packs[0].name):
        stored.read(whole_packs=[0])
    stored.read()


def test_chunks_of_others_behind_ours_are_part_of_the_tail():
    """Another snapshot's chunks may end a pack; ours is then proved by the footer behind them."""
    first = Stored({"old": random((50, 50)), "new": random((50, 50), 1), "last": random((50, 50), 2)})
    second = Stored({"old": first.tensors["old"]}, backend=first.backend, bases=[first.manifest])
    assert second.manifest.packs == first.manifest.packs
    counters = second.read(whole_packs=[0]).counters
    assert counters.bytes_read == 10_000
    assert counters.bytes_footers == 20_000 + footer_bytes(3)
    assert counters.requests == 1
    second.put(flip(15_000))
    second.read(whole_packs=[0])
    second.put(flip(-30))
    with pytest.raises(CorruptionError):
        second.read(whole_packs=[0])


def test_what_others_have_behind_ours_is_not_read_for_the_footer():
    """A pack of 64 MiB of which a fine-tuned model still uses the first chunk must not cost its last 8 MiB."""
    first = Stored({"old": random((10,)), "big": random((3000, 300), 1)}, pack_bytes=64 << 20)
    second = Stored({"old": first.tensors["old"]}, backend=first.backend, bases=[first.manifest])
    counters = second.read(whole_packs=[0]).counters
    assert counters.bytes_read == 40
    assert counters.bytes_footers <= 64 << 10
    second.put(flip(-30))
    with pytest.raises(CorruptionError):
        second.read(whole_packs=[0])


def test_a_footer_longer_than_the_tail_is_read_whole():
    many = {f"w{i:04}": torch.full((2,), float(i)) for i in range(1600)}
    first = Stored(many)
    assert footer_bytes(1600) > 64 << 10
    second = Stored({"w0000": many["w0000"]}, backend=first.backend, bases=[first.manifest])
    for stored in (first, second):
        counters = stored.read(whole_packs=[0]).counters
        assert counters.bytes_footers >= footer_bytes(1600)
        size = stored.manifest.packs[0].size_bytes
        stored.tensors = {"w0000": many["w0000"]}
        for at in (size - 1, size - footer_bytes(1600), size - (70 << 10), size - (30 << 10)):
            stored.put(flip(at))
            with pytest.raises(CorruptionError, match=stored.manifest.packs[0].name):
                stored.read(whole_packs=[0])
            stored.put(flip(at))


# ---- a cache before the storage, a copy beside it


class Placed(Stored):
    """The same behind a cache and beside a mirror."""

    def __init__(self, folder, tensors, **options):
        super().__init__(tensors, **options)
        self.mirror = MemoryBackend(uuid.uuid4().hex)
        for pack in self.manifest.packs:
            key = pack_key(pack.name)
            loop.run(self.mirror.put(key, [loop.run(self.backend.get(key))]))
        self.both = MirrorBackend(self.faults, self.mirror)
        self.cache = CacheBackend(self.both, folder, 1 << 30)

    def reader(self, **options):
        return Reader(self.cache, self.manifest, ReadOptions(**options))


@pytest.fixture
def placed(tmp_path):
    return Placed(tmp_path, {"w": random((700, 500)), "b": random((7,), 1) > 0.5, "c": random((5, 3), 2)})


def test_what_is_in_the_cache_is_not_asked_for_again(placed):
    whole = range(len(placed.manifest.packs))
    placed.read(whole_packs=whole)
    before = len(placed.faults.operations)
    reader = placed.read(whole_packs=whole)
    assert len(placed.faults.operations) == before
    assert (reader.counters.reread, reader.counters.healed) == (0, 0)


def test_bytes_that_arrived_damaged_do_not_stay_in_the_cache(placed):
    placed.faults.corrupt("get_into", 1000, prefix="packs/")
    reader = placed.read(num_workers=1)
    assert (reader.counters.reread, reader.counters.healed) == (1, 0)
    assert placed.read().counters.reread == 0


def test_a_footer_that_arrived_damaged_is_read_again(placed):
    placed.faults.corrupt("get_into", -1, prefix="packs/")
    reader = placed.read(whole_packs=range(len(placed.manifest.packs)), num_workers=1)
    assert (reader.counters.reread, reader.counters.healed) == (1, 0)


@pytest.mark.parametrize("times", [1, 2])
def test_a_damaged_chunk_is_read_from_the_mirror_and_told(placed, times, caplog):
    """In every load, for a load repairs nothing; not even the cache keeps what was damaged."""
    damaged = placed.needs("w")[0]
    placed.put(flip(int(placed.manifest.chunks.offset[damaged.row]) + 5))
    kept = loop.run(placed.backend.get(placed.key()))
    for _ in range(times):
        reader = placed.read()
        assert (reader.counters.reread, reader.counters.healed) == (1, 1)
    assert placed.mirror.url in caplog.text
    assert "heal()" in caplog.text
    assert loop.run(placed.backend.get(placed.key())) == kept, "nothing is repaired in silence"


def test_a_damaged_footer_is_proved_by_the_mirror(placed):
    placed.put(flip(-20))
    reader = placed.read(whole_packs=range(len(placed.manifest.packs)))
    assert (reader.counters.reread, reader.counters.healed) == (1, 1)


@pytest.mark.parametrize("cut", [0, 1000])
def test_a_pack_that_is_lost_or_cut_is_read_from_the_mirror(placed, cut):
    if cut:
        placed.put(lambda data: data[:cut])
    else:
        loop.run(placed.backend.delete(placed.key()))
    reader = placed.read(whole_packs=range(len(placed.manifest.packs)))
    assert reader.counters.reread == 0
    assert placed.both.num_helped > 0


def test_damage_in_both_copies_is_an_error_that_names_both(placed):
    damaged = placed.needs("w")[0]
    change = flip(int(placed.manifest.chunks.offset[damaged.row]) + 5)
    placed.put(change)
    loop.run(placed.mirror.put(placed.key(), [bytes(change(bytearray(loop.run(placed.mirror.get(placed.key())))))]))
    with pytest.raises(CorruptionError, match="on two reads") as caught:
        placed.read()
    assert placed.backend.url in str(caught.value)
    assert placed.mirror.url in str(caught.value)
    assert caught.value.context["key"] == placed.key()


def test_a_mirror_that_does_not_answer_changes_nothing_about_the_damage(placed):
    placed.put(flip(5))
    faults = FaultBackend(placed.mirror)
    faults.fail(None, AccessDeniedError("no"), times=100)
    reader = Reader(MirrorBackend(placed.backend, faults), placed.manifest, ReadOptions())
    with pytest.raises(CorruptionError, match="do not have the digest"):
        reader.read(placed.needs(), lambda *_: None)
    placed.put(flip(-1))
    with pytest.raises(CorruptionError, match="footer"):
        reader.read([], lambda *_: None, range(len(placed.manifest.packs)))


def test_storage_that_fails_on_the_second_read_is_told_as_such(stored):
    stored.put(flip(5))
    rule = stored.faults.fail("get_into", AccessDeniedError("no"), skip=1)
    with pytest.raises(AccessDeniedError):
        stored.read(num_workers=1)
    assert rule.num_hit == 1
