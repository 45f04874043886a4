from __future__ import annotations

import dataclasses
import threading
import time
import uuid

import pytest
import torch

from tests.distributed import simulated
from vescale_ckpt.errors import CorruptionError, MismatchError, NoSpaceError, RankFailureError
from vescale_ckpt.execute.commit import Meeting, commit, fragment_of
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_ckpt.execute.write import WriteOptions, Writer
from vescale_ckpt.format.fragment import decode_fragment, encode_fragment
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Shard
from vescale_ckpt.plan.parts import parts_of
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import Stager
from vescale_ckpt.state.tree import DictNode, PerRankNode, TensorNode, ValueNode
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import pack_key
from vescale_storage.refs import read_ref
from vescale_storage.wrappers.faults import FaultBackend

WORLD = 3
TREE = DictNode((("w", TensorNode()), ("c", TensorNode()), ("lr", ValueNode(0.5)), ("rng", PerRankNode(()))))


@pytest.fixture
def backend():
    return MemoryBackend(uuid.uuid4().hex)


def state(copies=(1.0, 1.0, 1.0)):
    """Return a sharded tensor and a copied one, and how each rank fills its copy."""
    full = torch.rand(100, 70, generator=torch.Generator().manual_seed(3))
    sharded = simulated.laid_out("w", (100, 70), Layout((WORLD,), (Shard(0),)), full=full)
    return [[sharded, simulated.replicated("c", (8,), WORLD, full=torch.full((8,), value))] for value in copies]


def written(backend, spreads, rank):
    """Return a rank's plan and what it wrote."""
    plan = simulated.plans(spreads, WORLD)[rank]
    leaves = [simulated.leaf_of(t, rank) for t in spreads]
    parts = []
    Stager(BufferPool(1 << 16, None), 5.0).stage(
        parts_of(plan.regions, plan.tensors, [4, 4], 1 << 16), leaves, parts.append, in_place=False
    )
    writer = Writer(backend, plan.tensors, DedupIndex([]), BufferPool(1 << 16, 4), WriteOptions())
    return plan, writer.write(parts)


def meeting(backend, rank=0, world_size=WORLD, **more):
    values = {
        "backend": backend,
        "transaction": "ab" * 16,
        "plan_key": b"plan",
        "run": "run",
        "step": 7,
        "rank": rank,
        "world_size": world_size,
        "deadline_seconds": 20.0,
    }
    return Meeting(**(values | more))


def all_commit(backend, change=None, ranks=range(WORLD), **more):
    """Let ranks write and commit at once, each on a thread; return what each came to."""
    outcomes = {}

    def main(rank):
        try:
            at = meeting(backend, rank, **more)
            with at.aborting():
                plan, done = written(backend, state()[rank], rank)
                asked = {"tree": TREE if rank == 0 else None, "per_rank": ((("rng",), ValueNode(rank)),)}
                asked |= {"metadata": {"from": rank}, "meeting": at} | (change(rank, done) if change else {})
                outcomes[rank] = commit(asked.pop("meeting"), plan, done, **asked)
        except Exception as error:  # noqa: BLE001 - what the test asks about
            outcomes[rank] = error

    threads = [threading.Thread(target=main, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return outcomes


async def _keys(backend, prefix):
    return [info.key async for info in backend.list(prefix)]


def keys(backend, prefix=""):
    return loop.run(_keys(backend, prefix))


def test_all_ranks_learn_the_ref_and_nothing_of_the_transaction_is_left(backend):
    outcomes = all_commit(backend)
    refs = {outcomes[rank][0] for rank in range(WORLD)}
    assert len(refs) == 1
    (ref,) = refs
    assert (ref.run, ref.step, ref.version, ref.transaction) == ("run", 7, 1, "ab" * 16)
    assert [outcomes[rank][1] is None for rank in range(WORLD)] == [False, True, True]
    manifest = outcomes[0][1]
    assert open_manifest(fetch_manifest(backend, ref), ref) == manifest
    assert keys(backend, "txn/") == []
    assert manifest.world_size == WORLD
    assert manifest.metadata == {"from": 0}, "the coordinator's"
    assert manifest.writer.startswith("vescale-ckpt")
    expected = PerRankNode(tuple((rank, ValueNode(rank)) for rank in range(WORLD)))
    assert manifest.tree == dataclasses.replace(TREE, items=(*TREE.items[:3], ("rng", expected)))


def test_the_manifest_does_not_depend_on_who_was_first(backend):
    first, second = all_commit(backend)[0][1], all_commit(backend, transaction="cd" * 16)[0][1]
    assert first.chunks == second.chunks
    assert first.packs == second.packs
    assert loop.run(read_ref(backend, "run", 7)).version == 2, "a step saved again is a version"


def test_one_rank_needs_no_transaction(backend):
    saved = simulated.save(backend, [simulated.replicated("c", (8,), 1, full=torch.ones(8))], 1)
    plan, done = saved.plans[0], saved.written[0]
    tree = DictNode((("c", TensorNode()),))
    ref, manifest = commit(meeting(backend, world_size=1), plan, done, tree=tree, per_rank=(), metadata={})
    assert ref.manifest
    assert manifest.tensors == plan.tensors
    assert keys(backend, "txn/") == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_while_writing_fails_all(backend, victim):
    def change(rank, done):
        if rank == victim:
            raise NoSpaceError("disk full")
        return {}

    began = time.monotonic()
    outcomes = all_commit(backend, change)
    assert time.monotonic() - began < 10, "nobody waits for the deadline"
    assert isinstance(outcomes[victim], NoSpaceError)
    for rank in set(range(WORLD)) - {victim}:
        assert isinstance(outcomes[rank], RankFailureError)
        assert f"rank {victim}" in str(outcomes[rank])
        assert "disk full" in str(outcomes[rank])
        assert victim in outcomes[rank].failures
    assert keys(backend, "refs/") == []


def test_errors_that_are_not_ours_are_told_too(backend):
    def change(rank, done):
        if rank == 2:
            raise MemoryError("no memory")
        return {}

    outcomes = all_commit(backend, change)
    assert isinstance(outcomes[2], MemoryError)
    assert "no memory" in str(outcomes[0])


def test_a_rank_that_never_comes_is_named_at_the_deadline(backend):
    outcomes = all_commit(backend, ranks=(0, 2), deadline_seconds=0.5)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], RankFailureError)
        assert "rank 1" in str(outcomes[rank])
    assert keys(backend, "refs/") == []


def test_a_coordinator_that_never_comes_is_named_at_the_deadline(backend):
    outcomes = all_commit(backend, ranks=(1, 2), deadline_seconds=0.5)
    for rank in (1, 2):
        assert isinstance(outcomes[rank], RankFailureError)
        assert "rank 0" in str(outcomes[rank])


def test_ranks_that_followed_different_plans_are_refused(backend):
    outcomes = all_commit(
        backend, lambda rank, _: {"meeting": meeting(backend, rank, plan_key=b"other")} if rank == 1 else {}
    )
    assert isinstance(outcomes[0], MismatchError)
    assert "different plans" in str(outcomes[0])
    assert isinstance(outcomes[1], RankFailureError)


def test_copies_that_differ_name_the_tensor_and_the_ranks(backend):
    def change(rank, done):
        done.compared = {1: bytes([rank == 2]) * 32}
        return {}

    outcomes = all_commit(backend, change)
    assert isinstance(outcomes[0], MismatchError)
    (problem,) = outcomes[0].problems
    assert problem == "'c': the copies differ: ranks 0-1: 000000000000; rank 2: 010101010101"
    for rank in (1, 2):
        assert isinstance(outcomes[rank], RankFailureError)
        assert "'c': the copies differ" in str(outcomes[rank])
    assert keys(backend, "refs/") == []


def test_trees_that_cannot_be_merged_name_what_differs(backend):
    other = dataclasses.replace(TREE, items=(*TREE.items[:2], ("lr", ValueNode(0.25)), TREE.items[3]))
    outcomes = all_commit(backend, lambda rank, _: {"tree": other} if rank == 2 else {})
    assert isinstance(outcomes[0], MismatchError)
    assert "'lr'" in str(outcomes[0])
    assert "ranks 0-1: 0.5; rank 2: 0.25" in str(outcomes[0])


def test_a_pack_that_is_not_there_is_named_with_the_rank_that_refers_to_it(backend):
    def change(rank, done):
        if rank == 1:
            loop.run(backend.delete(pack_key(done.packs[0].name)))
        return {}

    outcomes = all_commit(backend, change)
    assert isinstance(outcomes[0], CorruptionError)
    assert "cannot commit run@7" in str(outcomes[0])
    assert "which rank 1 refers to, is not there" in str(outcomes[0])
    assert keys(backend, "refs/") == []


def test_a_pack_of_another_size_is_refused(backend):
    def change(rank, done):
        if rank == 1:
            key = pack_key(done.packs[0].name)
            loop.run(backend.put(key, [loop.run(backend.get(key))[:-1]]))
        return {}

    assert "bytes, not" in str(all_commit(backend, change)[0])


def test_an_element_that_no_rank_wrote_is_refused(backend):
    def change(rank, done):
        if rank == 1:
            for column in (done.tensor, done.tile, done.digest, done.pack, done.offset, done.length, done.codec):
                column.clear()
            done.partial.clear()
        return {}

    outcome = all_commit(backend, change)[0]
    assert isinstance(outcome, CorruptionError)
    assert "not every element was written exactly once" in str(outcome)
    assert str(Box((34, 0), (34, 70))) in str(outcome)


def test_what_cannot_be_cleaned_up_does_not_undo_the_commit():
    inner = MemoryBackend(uuid.uuid4().hex)
    backend = FaultBackend(inner)
    rule = backend.fail("delete", NoSpaceError("no"), prefix="txn/", times=100)
    outcomes = all_commit(backend)
    assert {outcomes[rank][0].version for rank in range(WORLD)} == {1}
    assert rule.num_hit >= 1


def test_a_commit_whose_answer_is_lost_is_told_as_failed_and_stands(backend):
    """The ref was put and the coordinator never heard: its peers find the ref, and the next look at the step too."""
    faults = FaultBackend(backend)
    faults.lose_answer("put_if_absent", NoSpaceError("lost"), prefix="refs/")
    outcomes = all_commit(faults)
    assert loop.run(read_ref(backend, "run", 7)).version == 1
    for rank in (1, 2):
        assert not isinstance(outcomes[rank], Exception) or isinstance(outcomes[rank], RankFailureError)


def test_a_fragment_says_all_that_a_rank_did(backend):
    plan, done = written(backend, state()[1], 1)
    done.compared = {1: b"\1" * 32}
    fragment = decode_fragment(encode_fragment(fragment_of(1, b"plan", done, TREE, ((("rng",), ValueNode(1)),))))
    assert (fragment.rank, fragment.plan_key, fragment.tree) == (1, b"plan", TREE)
    assert fragment.replicas == done.compared
    assert fragment.packs == tuple(done.packs)
    assert len(fragment.chunks) == len(done.tensor) == len(list(plan.regions))
    assert fragment.counters == {"bytes_total": done.bytes_total, "bytes_put": done.bytes_put}
