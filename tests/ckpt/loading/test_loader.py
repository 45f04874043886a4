from __future__ import annotations

import copy
import logging
import math
import time
import uuid

import numpy as np
import pytest
import torch
from torch import nn

from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.errors import (
    CorruptionError,
    MismatchError,
    ObjectNotFoundError,
    RankFailureError,
    SnapshotNotFoundError,
    StoreNotFoundError,
)
from vescale_ckpt.execute.read import ReadOptions
from vescale_ckpt.loading.loader import Loader
from vescale_ckpt.plan.read_cost import ReadCost
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.saving.saver import Saver
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.store import Store
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import pack_key
from vescale_storage.wrappers.faults import FaultBackend

SHAPE = (600, 500)


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def storage():
    return MemoryBackend(uuid.uuid4().hex)


def store_at(backend, *, exists=True):
    return Store(backend, exists=exists)


def full(seed=0):
    return torch.from_numpy(np.random.default_rng(seed).random(SHAPE, dtype=np.float32))


def cut(tensor, group, dim):
    """Return a rank's part of a tensor along a dim, as a view of its own."""
    each = -(-tensor.shape[dim] // group.world_size)
    start = min(group.rank * each, tensor.shape[dim])
    part = tensor.narrow(dim, start, min(each, tensor.shape[dim] - start)).clone()
    offset = (start, 0) if dim == 0 else (0, start)
    return ShardedView(tuple(tensor.shape), tensor.dtype, [(offset, part)] if part.numel() else [])


def save(backend, make_state, world_size=1, *, step=1, run="run"):
    def body(group):
        saver = Saver(store_at(backend, exists=False), run, group, SaveOptions(deadline_seconds=20.0))
        saver.save(step, make_state(group), blocking=True, bases=(), metadata={})
        saver.close()

    all_well(run_ranks(world_size, body))
    return backend


def load(backend, group, state, *, step=None, run="run", verify_first=False, read=None, **options):
    loader = Loader(store_at(backend), group, read or ReadOptions())
    return loader.load(state, run=run, step=step, options=RestoreOptions(**options), verify_first=verify_first)


def loads(backend, make_state, world_size=1, **options):
    """Load on all ranks; return each one's state and report, or error."""

    def body(group):
        state = make_state(group)
        began = time.monotonic()
        try:
            outcome = load(backend, group, state, **options)
        except Exception as error:  # noqa: BLE001 - looked at by the caller
            outcome = error
        assert time.monotonic() - began < 20
        return state, outcome

    return all_well(run_ranks(world_size, body))


def equal(view, tensor):
    return all(
        torch.equal(local, tensor[at[0] : at[0] + local.shape[0], at[1] : at[1] + local.shape[1]])
        for at, local in view.pieces
    )


@pytest.mark.parametrize("saved", [(1, 0), (3, 0), (4, 1)], ids=["one rank", "rows", "columns"])
@pytest.mark.parametrize("loaded", [(1, 0), (2, 1), (5, 0), (3, 1)], ids=["one rank", "columns", "rows", "columns too"])
def test_what_one_layout_saved_another_loads_and_storage_gives_every_byte_once(saved, loaded):
    tensor, small = full(), torch.arange(7)
    backend = save(storage(), lambda g: {"w": cut(tensor, g, saved[1]), "s": small, "lr": 0.5}, saved[0])

    def target(group):
        return {"w": cut(torch.zeros(SHAPE), group, loaded[1]), "s": torch.zeros(7, dtype=torch.int64), "lr": 0.0}

    outcomes = loads(backend, target, loaded[0])
    for state, report in outcomes:
        assert equal(state["w"], tensor)
        assert torch.equal(state["s"], small)
        assert state["lr"] == 0.5
        assert (report.run, report.step, report.version, report.notes) == ("run", 1, 1, ())
        assert report.bytes_needed == sum(local.nbytes for _, local in state["w"].pieces) + small.nbytes
        assert report.seconds.keys() == {"open", "plan", "read", "finish", "total"}
    assert sum(report.bytes_read for _, report in outcomes) == tensor.nbytes + small.nbytes


def test_copies_on_all_ranks_are_read_once_and_exchanged():
    tensor = full()
    backend = save(storage(), lambda _: {"w": tensor})
    outcomes = loads(backend, lambda _: {"w": torch.zeros(SHAPE)}, 4)
    assert all(torch.equal(state["w"], tensor) for state, _ in outcomes)
    reads = [report.bytes_read for _, report in outcomes]
    assert sum(reads) == tensor.nbytes
    assert max(reads) <= 0.5 * tensor.nbytes
    assert all(report.bytes_read + report.bytes_exchanged == tensor.nbytes for _, report in outcomes)


def test_copies_are_read_by_each_rank_where_rank_0_finds_that_faster():
    tensor = full()
    backend = save(storage(), lambda _: {"w": tensor})
    local = ReadCost(rank_bytes_per_second=9e9, storage_bytes_per_second=math.inf, link_bytes_per_second=1e9)

    def body(group):
        read = ReadOptions(cost=local if group.rank == 0 else ReadCost())
        state = {"w": torch.zeros(SHAPE)}
        return state, load(backend, group, state, read=read)

    for state, report in all_well(run_ranks(3, body)):
        assert torch.equal(state["w"], tensor)
        assert (report.bytes_read, report.bytes_exchanged) == (tensor.nbytes, 0)


def test_the_newest_step_or_the_one_asked_for_on_all_ranks():
    backend = storage()
    for step in (1, 10, 2):
        save(backend, lambda _, step=step: {"step": step, "w": torch.full((3,), step)}, step=step)
    for asked, found in ((None, 10), (2, 2)):
        target = {"step": 0, "w": torch.zeros(3, dtype=torch.int64)}
        for state, report in loads(backend, lambda _, target=target: copy.deepcopy(target), 2, step=asked):
            assert (report.step, state["step"], state["w"].tolist()) == (found, found, [found] * 3)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"run": "run", "step": 9}, ["'run@9'", "steps 1"]),
        ({"run": "other"}, ["'other'", "its runs are 'run'"]),
    ],
)
def test_what_is_not_there_is_told_on_all_ranks(asked, words):
    backend = save(storage(), lambda _: {"w": torch.ones(3)})
    outcomes = [outcome for _, outcome in loads(backend, lambda _: {"w": torch.zeros(3)}, 3, **asked)]
    assert isinstance(outcomes[0], SnapshotNotFoundError)
    for outcome in outcomes:
        assert isinstance(outcome, SnapshotNotFoundError | RankFailureError)
        assert all(word in str(outcome) for word in words), str(outcome)


def test_an_empty_place_is_no_store():
    def body(group):
        loader = Loader(store_at(storage(), exists=False), group, ReadOptions())
        loader.load({}, run="run", step=None, options=RestoreOptions())

    (error,) = run_ranks(1, body)
    assert isinstance(error, StoreNotFoundError)


# ---- validation comes first


GOOD = {"a": torch.arange(4.0), "b": torch.arange(6.0).reshape(2, 3), "n": {"c": torch.ones(2)}, "lr": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.update(extra=torch.zeros(1)), ["missing 'extra'"]),
        (lambda s: s.pop("b"), ["'b'"]),
        (lambda s: s.update(a=torch.zeros(5)), ["'a'", "[5]", "[4]"]),
        (lambda s: s.update(a=torch.zeros(4, dtype=torch.bfloat16)), ["'a'", "bfloat16", "float32", "cast=True"]),
        (lambda s: s.update(b=torch.zeros(3, 2)), ["'b'", "[3, 2]", "[2, 3]"]),
        (lambda s: s["n"].update(c=3.5), ["'n.c'"]),
        (lambda s: s.update(lr=torch.zeros(1)), ["'lr'"]),
        (lambda s: s.update(n=[torch.zeros(2)]), ["'n'"]),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "transposed", "value for tensor", "tensor for value", "container"],
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_what_does_not_fit_is_told_on_all_ranks_and_nothing_is_changed(change, words, world_size):
    backend = save(storage(), lambda _: GOOD)

    def target(_):
        state = {"a": torch.zeros(4), "b": torch.zeros(2, 3), "n": {"c": torch.zeros(2)}, "lr": 0.0}
        change(state)
        return state

    before = str(target(None))
    for state, outcome in loads(backend, target, world_size):
        assert isinstance(outcome, MismatchError), outcome
        assert "cannot load run@1" in str(outcome)
        assert "nothing was changed" in str(outcome)
        for word in words:
            assert word in str(outcome)
        assert outcome.problems
        assert str(state) == before


def test_every_problem_of_every_rank_is_in_one_error():
    backend = save(storage(), lambda _: GOOD)

    def target(group):
        state = {"a": torch.zeros(4), "b": torch.zeros(2, 3), "n": {"c": torch.zeros(2)}, "lr": 0.0}
        state["a" if group.rank else "b"] = torch.zeros(9)
        return state

    for _, outcome in loads(backend, target, 3):
        assert len(outcome.problems) == 2
        assert any(line.startswith("rank 0: 'b'") for line in outcome.problems)
        assert any(line.startswith("rank 1, 2: 'a'") for line in outcome.problems)


def test_what_is_stored_must_have_a_place_on_some_rank():
    backend = save(storage(), lambda _: {"model": nn.ModuleDict({str(i): nn.Linear(2, 2) for i in range(4)})})

    def stage(of):
        return lambda g: {"model": nn.ModuleDict({str(i): nn.Linear(2, 2) for i in of(g)})}

    for _, report in loads(backend, stage(lambda g: (2 * g.rank, 2 * g.rank + 1)), 2):
        assert not isinstance(report, Exception), report
    for _, outcome in loads(backend, stage(lambda g: (g.rank,)), 2):
        assert isinstance(outcome, MismatchError)
        assert "model.2.weight" in str(outcome)
        assert "model.0" not in str(outcome)


def test_options_allow_one_thing_each_and_are_reported():
    backend = save(storage(), lambda _: GOOD)
    ((state, report),) = loads(
        backend,
        lambda _: {"a": torch.zeros(4, dtype=torch.float64), "beta": torch.zeros(2, 3), "lr": 7.0},
        cast=True,
        rename={"beta": "b"},
        ignore=("lr", "n"),
    )
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert state["beta"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["lr"] == 7.0
    for words in ("cast from float32 to float64", "rename 'beta'", "ignore 'lr'"):
        assert any(words in note for note in report.notes), report.notes


class Theirs:
    """An object whose own code fails on one rank."""

    def __init__(self, where=None):
        self.where, self.got = where, None

    def state_dict(self):
        if self.where == "state_dict":
            raise ValueError("their code")
        return {"x": 1}

    def load_state_dict(self, state):
        if self.where == "load_state_dict":
            raise RuntimeError("their code")
        self.got = state


@pytest.mark.parametrize("where", ["state_dict", "load_state_dict"])
def test_their_code_that_fails_on_one_rank_fails_all(where):
    backend = save(storage(), lambda _: {"o": Theirs(), "w": torch.ones(2)})
    outcomes = loads(backend, lambda g: {"o": Theirs(where if g.rank == 1 else None), "w": torch.zeros(2)}, 3)
    assert isinstance(outcomes[1][1], ValueError | RuntimeError)
    for rank in (0, 2):
        assert isinstance(outcomes[rank][1], RankFailureError)
        assert "their code" in str(outcomes[rank][1])


def test_their_code_gets_what_was_stored():
    backend = save(storage(), lambda _: {"o": Theirs()})
    ((state, _),) = loads(backend, lambda _: {"o": Theirs()})
    assert state["o"].got == {"x": 1}


# ---- values per rank


def test_every_rank_gets_its_own_value_back():
    backend = save(storage(), lambda g: {"rng": PerRank({"seed": g.rank, "t": torch.full((2,), g.rank)})}, 3)
    for rank, (state, _) in enumerate(
        loads(backend, lambda _: {"rng": PerRank({"seed": None, "t": torch.zeros(2, dtype=torch.int64)})}, 3)
    ):
        assert state["rng"].value["seed"] == rank
        assert state["rng"].value["t"].tolist() == [rank, rank]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_per_rank_are_not_given_to_another_number_of_ranks(world_size):
    backend = save(storage(), lambda g: {"rng": PerRank(g.rank), "w": torch.ones(4)}, 3)

    def target(group):
        return {"rng": PerRank(77), "w": torch.zeros(4)}

    for state, outcome in loads(backend, target, world_size):
        assert isinstance(outcome, MismatchError)
        assert f"of 3 ranks; this is rank 0 of {world_size}" in str(outcome)
        assert "ignore=('rng',)" in str(outcome)
        assert state["w"].sum() == 0
    for state, report in loads(backend, target, world_size, ignore=("rng",)):
        assert not isinstance(report, Exception), report
        assert state["rng"].value == 77
        assert state["w"].sum() == 4


# ---- damage


def packs_of(backend):
    manifest = store_at(backend)["run"].manifest
    return manifest, [pack_key(pack.name) for pack in manifest.packs]


def change(backend, key, what):
    loop.run(backend.put(key, [bytes(what(bytearray(loop.run(backend.get(key)))))]))


def flipped(at):
    def flip(data):
        data[at] ^= 1
        return data

    return flip


def two_tensors(backend, world_size=1):
    """Save two tensors in two saves, so that each has a pack of its own; return what they hold."""
    tensors = {"first": full(1), "second": full(2)}
    save(backend, lambda _: {"first": tensors["first"]}, world_size, step=0)
    save(backend, lambda _: dict(tensors), world_size)
    return tensors


def empty(_):
    return {"first": torch.zeros(SHAPE), "second": torch.zeros(SHAPE)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_damage_that_shows_while_filling_says_what_is_filled_already(world_size):
    backend = storage()
    two_tensors(backend)
    manifest, keys = packs_of(backend)
    row = max(range(len(manifest.chunks)), key=lambda row: (manifest.chunks.pack[row], manifest.chunks.offset[row]))
    victim = "second" if row >= manifest.chunks.first[1] else "first"
    change(backend, keys[int(manifest.chunks.pack[row])], flipped(int(manifest.chunks.offset[row])))
    outcomes = loads(backend, empty, world_size, read=ReadOptions(num_workers=1, span_bytes=1))
    assert any(isinstance(outcome, CorruptionError) for _, outcome in outcomes)
    for state, outcome in outcomes:
        assert isinstance(outcome, CorruptionError | RankFailureError)
        assert f"cannot load '{victim}'" in str(outcome)
        really = {name for name, tensor in state.items() if tensor.any()}
        assert really <= set(outcome.context["filled"])
        for name in really:
            assert f"'{name}'" in str(outcome)
        if outcome.context["filled"]:
            assert "already filled, in whole or in part" in str(outcome)
        else:
            assert "nothing of the state was changed" in str(outcome)
    if world_size == 1:
        assert outcomes[0][1].context["filled"] == ["first", "second"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_verified_first_nothing_is_touched(world_size):
    backend = storage()
    tensors = two_tensors(backend)
    manifest, keys = packs_of(backend)
    row = int(manifest.chunks.first[2]) - 1
    at = keys[int(manifest.chunks.pack[row])], flipped(int(manifest.chunks.offset[row]))
    change(backend, *at)
    for state, outcome in loads(backend, empty, world_size, verify_first=True):
        assert isinstance(outcome, CorruptionError | RankFailureError)
        assert "nothing of the state was changed" in str(outcome)
        assert not any(tensor.any() for tensor in state.values())
    change(backend, *at)
    faults = FaultBackend(backend)
    outcomes = loads(faults, empty, world_size, verify_first=True)
    assert all(torch.equal(state[name], tensor) for state, _ in outcomes for name, tensor in tensors.items())
    assert sum(report.bytes_read for _, report in outcomes) == 2 * full().nbytes


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_end_of_every_pack_that_is_read_is_proved(world_size):
    backend = storage()
    two_tensors(backend)
    _, keys = packs_of(backend)
    assert len(keys) >= 2
    for key in keys:
        change(backend, key, flipped(-25))
        outcomes = [outcome for _, outcome in loads(backend, empty, world_size)]
        assert all(isinstance(outcome, CorruptionError | RankFailureError) for outcome in outcomes)
        assert all(key.rpartition("/")[2] in str(outcome) for outcome in outcomes)
        change(backend, key, flipped(-25))
    outcomes = loads(backend, empty, world_size)
    overhead = sum(report.bytes_overhead for _, report in outcomes)
    assert 0 < overhead < 0.01 * full().nbytes, "every footer once, on one rank"


def test_a_pack_that_nobody_needs_is_not_looked_at():
    backend = storage()
    two_tensors(backend)
    manifest, keys = packs_of(backend)
    second = {keys[int(p)] for p in manifest.chunks.pack[int(manifest.chunks.first[1]) :]}
    for key in second:
        loop.run(backend.delete(key))
    ((state, report),) = loads(backend, lambda _: {"first": torch.zeros(SHAPE)}, only=("first",))
    assert not isinstance(report, Exception), report
    assert state["first"].any()


def test_a_lost_pack_names_itself_and_what_was_in_it():
    backend = storage()
    two_tensors(backend)
    _, keys = packs_of(backend)
    loop.run(backend.delete(keys[0]))
    outcomes = [outcome for _, outcome in loads(backend, empty, 2)]
    assert any(isinstance(outcome, ObjectNotFoundError) for outcome in outcomes)
    assert all(keys[0] in str(outcome) for outcome in outcomes)


def test_rounds_of_a_small_size_load_the_same(monkeypatch):
    monkeypatch.setattr("vescale_ckpt.loading.loader._ROUND_BYTES", 300_000)
    tensor = full()
    backend = save(storage(), lambda _: {"w": tensor})
    outcomes = loads(backend, lambda _: {"w": torch.zeros(SHAPE)}, 3)
    assert all(torch.equal(state["w"], tensor) for state, _ in outcomes)
    assert sum(report.bytes_read for _, report in outcomes) == tensor.nbytes


def test_tied_tensors_are_stored_once_and_filled_once():
    tied = nn.Linear(30, 20, bias=False)
    backend = save(storage(), lambda _: {"a": tied, "b": tied.weight})
    other = nn.Linear(30, 20, bias=False)
    ((_, report),) = loads(backend, lambda _: {"a": other, "b": other.weight})
    assert torch.equal(other.weight, tied.weight)
    assert report.bytes_needed == report.bytes_read == 2400
