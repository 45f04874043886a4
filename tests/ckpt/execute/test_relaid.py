"""The same elements saved again under another layout are found in chunks that are cut along other lines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale_ckpt as vc
from tests.cases import worlds
from vescale_storage import loop
from vescale_storage.keys import pack_key

SHAPES = [(1024, 1024), (1030, 517), (3000, 100), (5027, 64), (1024,), (7,)]


@pytest.fixture
def store():
    return worlds.memory_store()


def shard(tensor, dim, num_ranks, rank):
    """Return what a rank holds of a tensor that is cut as torch cuts: by ``ceil(n / ranks)``."""
    dim = min(dim, tensor.ndim - 1)
    size = -(-tensor.shape[dim] // num_ranks)
    low = min(rank * size, tensor.shape[dim])
    length = min(size, tensor.shape[dim] - low)
    offset = tuple(low if d == dim else 0 for d in range(tensor.ndim))
    pieces = [(offset, tensor.narrow(dim, low, length))] if length else []
    return vc.ShardedView(tuple(tensor.shape), tensor.dtype, pieces)


def save(store, run, weights, layout, base=None):
    """Save as ``layout`` = (dim, ranks); return the reports and the bytes that storage took."""
    dim, num_ranks = layout

    def state_of(rank):
        return {name: shard(tensor, dim, num_ranks, rank) for name, tensor in weights.items()}

    before = store.counts.up_bytes
    reports = worlds.save(store, num_ranks, state_of, step=0, run=run, base=base)
    return reports, store.counts.up_bytes - before


def assert_holds(store, name, weights):
    for key, tensor in weights.items():
        got = store[name].read(key)
        assert got.view(torch.uint8).equal(tensor.view(torch.uint8)), key


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 1), (0, 4)),
        ((0, 1), (1, 4)),
        ((0, 4), (0, 3)),
        ((0, 4), (0, 2)),
        ((1, 3), (1, 4)),
        ((1, 4), (0, 3)),
        ((0, 3), (0, 1)),
    ],
)
def test_another_layout_adds_at_most_two_percent(store, first, second):
    weights = {f"w{i}": torch.rand(shape) for i, shape in enumerate(SHAPES)}
    _, stored = save(store, "a", weights, first)
    reports, added = save(store, "b", weights, second, base="a@0")
    assert sum(report.bytes_written for report in reports) == 0
    assert added <= 0.02 * stored
    assert_holds(store, "b@0", weights)


def test_three_layouts_of_one_run_store_the_state_once(store):
    weights = {f"w{i}": torch.rand(shape) for i, shape in enumerate(SHAPES)}
    _, stored = save(store, "a", weights, (0, 4))
    added = [save(store, run, weights, layout, base="a@0")[1] for run, layout in (("b", (1, 3)), ("c", (0, 1)))]
    assert sum(added) <= 0.02 * stored


def test_where_one_rank_has_changed_its_part_the_others_parts_are_cut_out(store):
    old = {"w": torch.arange(300, dtype=torch.float32).reshape(30, 10)}  # one tile
    save(store, "a", old, (0, 1))
    new = {"w": old["w"].clone()}
    new["w"][9] = -1  # of the second of four ranks
    reports, _ = save(store, "b", new, (0, 4), base="a@0")
    assert [report.packs for report in reports] == [1, 1, 0, 0]  # the coordinator's is what it cut out
    assert [report.bytes_written > 0 for report in reports] == [True, True, False, False]
    assert_holds(store, "b@0", new)
    assert_holds(store, "a@0", old)
    assert store["b@0"].verify().ok
    assert len(store["b@0"].manifest.chunks) == 4


def test_equal_parts_that_are_cut_out_are_stored_once(store):
    old = {"w": torch.ones(32, 8)}
    save(store, "a", old, (0, 1))
    new = {"w": old["w"].clone()}
    new["w"][31] = 5
    save(store, "b", new, (0, 4), base="a@0")
    assert_holds(store, "b@0", new)
    digests = {bytes(row) for row in store["b@0"].manifest.chunks.digest}
    assert (len(digests), len(store["b@0"].manifest.chunks)) == (2, 4)


def test_negative_zero_and_the_payload_of_a_nan_are_differences(store):
    quiet = torch.tensor([0x7FC00001, 0, 1, 2], dtype=torch.int32).view(torch.float32)
    save(store, "a", {"w": quiet}, (0, 1))
    new = torch.tensor([0x7FC00002, -(1 << 31), 1, 2], dtype=torch.int32).view(torch.float32)
    save(store, "b", {"w": new}, (0, 2), base="a@0")
    assert_holds(store, "b@0", {"w": new})


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_base_that_is_damaged_is_not_referred_to(store, how):
    weights = {"w": torch.rand(100, 10)}
    save(store, "a", weights, (0, 1))
    key = pack_key(store["a@0"].manifest.packs[0].name)
    data = bytearray(loop.run(store.backend.get(key)))
    loop.run(store.backend.delete(key))
    if how == "changed":
        data[5] ^= 1
        loop.run(store.backend.put(key, [bytes(data)]))
    reports, _ = save(store, "b", weights, (0, 3), base="a@0")
    assert all(report.bytes_written > 0 for report in reports)
    assert_holds(store, "b@0", weights)


layouts = st.tuples(st.integers(0, 2), st.integers(1, 5))


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple).filter(bool),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.complex128, torch.bfloat16]),
    chain=st.lists(layouts, min_size=2, max_size=4),
    changes=st.lists(st.integers(0, 10**6), max_size=3),
)
def test_whatever_changes_and_however_it_is_cut_what_was_saved_is_read(shape, dtype, chain, changes):
    store = worlds.memory_store()
    count = torch.Size(shape).numel()
    tensor = torch.arange(count).to(dtype).reshape(shape)
    for number, layout in enumerate(chain):
        if count and number and number <= len(changes):
            tensor = tensor.clone()
            tensor.view(-1)[changes[number - 1] % count] += 1
        save(store, f"r{number}", {"w": tensor}, layout, base=f"r{number - 1}@0" if number else None)
        got = store[f"r{number}@0"].read("w")
        assert (got.shape, got.dtype) == (tensor.shape, dtype)
        assert torch.equal(got, tensor)


def test_what_is_cut_out_twice_is_in_packs_of_other_names(store):
    """A collection may be about to delete the pack that an earlier save cut out: its name is not used again."""
    old = {"w": torch.arange(300, dtype=torch.float32).reshape(30, 10)}
    new = {"w": old["w"].clone()}
    new["w"][0] = -1  # the coordinator's own part
    save(store, "a", old, (0, 1))
    names = []
    for run in ("b", "c"):
        save(store, run, new, (0, 4), base="a@0")
        assert_holds(store, f"{run}@0", new)
        manifest = store[f"{run}@0"].manifest
        names.append([manifest.packs[pack].name for pack in manifest.chunks.pack])
    assert names[0][0] == names[1][0], "what a rank writes is in the same pack when it is written again"
    assert not set(names[0][1:]) & set(names[1][1:])
