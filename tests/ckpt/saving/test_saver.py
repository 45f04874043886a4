from __future__ import annotations

import gc
import logging
import threading
import time
import uuid

import pytest
import torch

from tests.distributed.threads import all_well, run_ranks
from vescale_ckpt.coordinate.group import SoloGroup
from vescale_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    MismatchError,
    NoSpaceError,
    RankFailureError,
    SnapshotNotFoundError,
)
from vescale_ckpt.saving.handle import SaveState
from vescale_ckpt.saving.options import SaveOptions
from vescale_ckpt.saving.saver import Saver
from vescale_ckpt.state.per_rank import PerRank
from vescale_ckpt.state.sharded_view import ShardedView
from vescale_ckpt.store import Store
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.keys import manifest_key
from vescale_storage.wrappers.faults import FaultBackend, Rule

MIB = 1 << 20


def storage():
    return MemoryBackend(uuid.uuid4().hex)


def store_at(backend):
    return Store(backend, exists=False)


def saver(backend, group, **options):
    return Saver(store_at(backend), "run", group, SaveOptions(**({"deadline_seconds": 20.0} | options)))


def save(saver, step, state, *, blocking=True, bases=(), metadata=None):
    return saver.save(step, state, blocking=blocking, bases=bases, metadata=metadata or {})


def rows_of(tensor, group):
    """Return a rank's even share of the rows of a tensor."""
    each = len(tensor) // group.world_size
    start = group.rank * each
    return ShardedView(tuple(tensor.shape), tensor.dtype, [((start, 0), tensor[start : start + each].clone())])


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL)


def test_what_all_ranks_hold_becomes_one_snapshot():
    backend, full = storage(), torch.rand(800, 300)

    def body(group):
        state = {
            "w": rows_of(full, group),
            "copied": torch.arange(5),
            "lr": 0.5,
            "rng": PerRank({"seed": group.rank, "state": torch.full((3,), group.rank)}),
        }
        return save(saver(backend, group), 7, state, metadata={"by": "test"}).result()

    reports = all_well(run_ranks(4, body))
    snapshot = store_at(backend)["run@7"]
    state = snapshot.state_dict()
    assert torch.equal(state["w"], full)
    assert state["copied"].tolist() == [0, 1, 2, 3, 4]
    assert state["lr"] == 0.5
    assert {rank: value["seed"] for rank, value in state["rng"].items()} == {0: 0, 1: 1, 2: 2, 3: 3}
    assert state["rng"][2]["state"].tolist() == [2, 2, 2]
    assert snapshot.metadata == {"by": "test"}
    assert sum(r.bytes_total for r in reports) == full.nbytes + 5 * 8 + 4 * 3 * 8
    assert {(r.run, r.step, r.version) for r in reports} == {("run", 7, 1)}
    assert all(r.seconds.keys() >= {"plan", "stage", "write", "commit", "total"} for r in reports)


def test_a_plan_that_still_fits_costs_one_collective():
    backend = storage()

    def body(group):
        mine, state = saver(backend, group), {"w": torch.zeros(4), "step": 0, "rng": PerRank(group.rank)}
        counts = []
        for step in range(3):
            before = group.num_collectives
            state["w"] += 1
            state["rng"] = PerRank([group.rank, step])
            save(mine, step, state)
            counts.append(group.num_collectives - before)
        return counts

    counts = all_well(run_ranks(3, body))
    assert counts[0][1:] == [1, 1]
    assert counts[0][0] > 1
    assert store_at(backend)["run@2"].read("w").tolist() == [3, 3, 3, 3]


def test_a_change_on_one_rank_makes_all_plan_again():
    backend, full = storage(), torch.rand(12, 3)
    splits = [(0, 6, 12), (0, 2, 12), (0, 6, 12)]

    def body(group):
        mine = saver(backend, group)
        for step, cut in enumerate(splits):
            a, b = cut[group.rank], cut[group.rank + 1]
            save(mine, step, {"w": ShardedView((12, 3), torch.float32, [((a, 0), full[a:b].clone())])})

    all_well(run_ranks(2, body))
    for step in range(3):
        assert torch.equal(store_at(backend)[f"run@{step}"].read("w"), full)


# ---- refusals, on all ranks within seconds


class Broken:
    """An object whose own code fails."""

    def __init__(self, error=None):
        self.error = error

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, _):
        raise AssertionError


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (object, InvalidInputError),
        (lambda: Broken(ValueError("their code")), ValueError),
        (lambda: Broken(RuntimeError("their code")), RuntimeError),
        (lambda: torch.zeros(2, device="meta"), InvalidInputError),
    ],
    ids=["no state", "their ValueError", "their RuntimeError", "no memory"],
)
def test_a_rank_that_cannot_say_what_it_holds_fails_all(broken, error):
    backend = storage()

    def body(group):
        mine = saver(backend, group, deadline_seconds=60.0)
        save(mine, 0, {"w": torch.ones(1)})
        began = time.monotonic()
        try:
            save(mine, 1, {"w": torch.ones(1), "o": broken() if group.rank == 1 else Broken()})
        except Exception as problem:  # noqa: BLE001 - looked at below
            assert time.monotonic() - began < 10
            save(mine, 2, {"w": torch.ones(1)})
            return problem
        return None

    outcomes = all_well(run_ranks(3, lambda group: [body(group)]))
    assert isinstance(outcomes[1][0], error)
    for rank in (0, 2):
        assert isinstance(outcomes[rank][0], RankFailureError), outcomes[rank]
        assert set(outcomes[rank][0].failures) == {1}
    assert [info.step for info in store_at(backend).snapshots("run")] == [0, 2]


def differing(make_state, **options):
    """Save a state that differs between two ranks; return what each rank raised."""
    backend = storage()

    def body(group):
        mine = saver(backend, group, **options)
        began = time.monotonic()
        try:
            save(mine, 3, make_state(group.rank))
        except Exception as error:  # noqa: BLE001 - looked at by the caller
            assert time.monotonic() - began < 10
            return [error]
        return [None]

    outcomes = [error for (error,) in all_well(run_ranks(2, body))]
    with pytest.raises(SnapshotNotFoundError):
        store_at(backend)["run@3"]
    return outcomes


@pytest.mark.parametrize(
    ("make_state", "words"),
    [
        (lambda rank: {"w": torch.ones(2)} | ({"extra": torch.ones(1)} if rank else {}), ["'extra'", "rank 1"]),
        (lambda rank: {"w": torch.ones(2)} | ({} if rank else {"side": 1}), ["'side'", "rank 0"]),
        (lambda rank: {"w": torch.ones(2, dtype=[torch.float32, torch.float64][rank])}, ["'w'", "dtype", "float64"]),
        (lambda rank: {"w": torch.ones(2 + rank)}, ["'w'", "shape", "(2,)", "(3,)"]),
        (lambda rank: {"w": torch.ones(2), "lr": 0.1 * (rank + 1)}, ["'lr'", "0.1", "0.2"]),
        (lambda rank: {"w": torch.ones(2), "lr": [1, 1.0][rank]}, ["'lr'", "1", "1.0"]),
        (lambda rank: {"w": [torch.ones(2)] * (rank + 1)}, ["'w'", "list"]),
    ],
    ids=["unexpected tensor", "missing value", "dtype", "shape", "value", "type of a value", "length of a list"],
)
def test_ranks_that_disagree_are_told_on_all_of_them_what_differs(make_state, words):
    for error in differing(make_state):
        assert isinstance(error, MismatchError)
        for word in words:
            assert word in str(error), str(error)


def test_keys_may_come_in_another_order_on_every_rank():
    backend = storage()

    def body(group):
        items = [("a", torch.zeros(2)), ("b", torch.ones(3)), ("c", 3)]
        save(saver(backend, group), 1, dict(items if group.rank else items[::-1]))

    all_well(run_ranks(2, body))
    assert store_at(backend)["run@1"].read("b").tolist() == [1, 1, 1]


def test_plain_tensors_of_one_name_and_different_values_are_never_picked_from():
    """One rank's copy used to win in silence; which one depended on the load."""
    coordinator, other = differing(lambda rank: {"weight": torch.tensor([2 * rank, 2 * rank + 1])})
    assert isinstance(coordinator, MismatchError)
    assert isinstance(other, RankFailureError)
    for error in (coordinator, other):
        assert "'weight': the copies differ" in str(error)
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)


def test_large_copies_are_compared_whole_where_it_is_asked_for():
    def state(rank):
        tensor = torch.zeros(600, 600)
        tensor[599, 599] = rank
        return {"w": tensor}

    coordinator, _ = differing(state, check_replicas=True)
    assert "'w': the copies differ" in str(coordinator)


def test_ranks_that_save_different_steps_or_runs_or_bases_are_told():
    backend = storage()

    def body(group):
        mine = saver(backend, group)
        found = []
        for step, bases in ((group.rank, ()), (5, ("other@1",) * group.rank)):
            try:
                save(mine, step, {"w": torch.ones(1)}, bases=bases)
            except MismatchError as error:
                found.append(str(error))
        return found

    for found in all_well(run_ranks(2, body)):
        assert "0 on rank 0, 1 on rank 1" in found[0]
        assert "different runs or bases" in found[1]


# ---- storage that fails


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_whose_storage_fails_fails_all_and_the_next_save_works(victim):
    backend, full = storage(), torch.rand(30, 4)

    def body(group):
        faults = FaultBackend(backend)
        mine = saver(faults, group)
        save(mine, 0, {"w": rows_of(full, group)})
        if group.rank == victim:
            faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
        try:
            save(mine, 1, {"w": rows_of(full + 1, group)})
        except Exception as error:  # noqa: BLE001 - looked at below
            save(mine, 2, {"w": rows_of(full + 2, group)})
            return [error]
        return [None]

    outcomes = [error for (error,) in all_well(run_ranks(3, body))]
    for rank, error in enumerate(outcomes):
        assert isinstance(error, NoSpaceError if rank == victim else RankFailureError)
        assert "disk full" in str(error)
    assert [info.step for info in store_at(backend).snapshots("run")] == [0, 2]
    assert torch.equal(store_at(backend)["run@2"].read("w"), full + 2)


def test_a_background_failure_is_raised_by_the_next_save_on_all_ranks_and_then_forgotten():
    backend = storage()

    def body(group):
        faults = FaultBackend(backend)
        mine = saver(faults, group)
        if group.rank == 1:
            faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
        handle = save(mine, 1, {"w": rows_of(torch.ones(4, 1), group)}, blocking=False)
        handle.wait_done()
        if group.rank == 0:
            handle.outcome()  # seen here, by one rank only
        with pytest.raises(RankFailureError, match=r"background save of run@1 failed.*call save again") as caught:
            save(mine, 2, {"w": rows_of(torch.ones(4, 1), group)})
        assert caught.value.context["step"] == 1
        return save(mine, 3, {"w": rows_of(torch.ones(4, 1), group)}).result().step

    assert all_well(run_ranks(2, body)) == [3, 3]


def test_finishing_waits_for_all_and_raises_what_nobody_has_seen():
    faults = FaultBackend(storage())

    def body(group):
        mine = saver(faults, group)
        save(mine, 0, {"w": torch.ones(3)}, blocking=False)
        mine.finish()
        faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/")
        handle = save(mine, 1, {"w": torch.ones(3) * 2}, blocking=False)
        with pytest.raises(NoSpaceError, match="disk full"):
            mine.finish()
        assert handle.state is SaveState.FAILED
        mine.finish()
        mine.close()
        return True

    assert all_well(run_ranks(1, body)) == [True]


@pytest.mark.parametrize("what", ["ref", "manifest"])
def test_a_damaged_newest_snapshot_does_not_keep_later_ones_from_being_saved(what):
    backend = storage()

    def body(group):
        mine = saver(backend, group)
        save(mine, 1, {"w": torch.ones(3)})
        ref = store_at(backend)["run"].ref
        key = ref.key if what == "ref" else manifest_key(ref.manifest)
        loop.run(backend.put(key, [b"damaged" + loop.run(backend.get(key))]))
        fresh = saver(backend, group)
        return save(fresh, 2, {"w": torch.ones(3)}).result().bytes_deduplicated

    assert all_well(run_ranks(1, body)) == [0]
    assert store_at(backend)["run@2"].read("w").tolist() == [1, 1, 1]


def test_a_lost_pack_does_not_keep_later_snapshots_from_being_saved():
    backend = storage()

    async def lose():
        for key in [info.key async for info in backend.list("packs/")]:
            await backend.delete(key)

    def body(group):
        mine = saver(backend, group)
        save(mine, 1, {"w": rows_of(torch.ones(4, 2), group)})
        if group.rank == 0:
            loop.run(lose())
        group.all_gather_fixed(b"")
        return save(mine, 2, {"w": rows_of(torch.ones(4, 2), group)}).result().bytes_deduplicated

    all_well(run_ranks(2, body))
    assert torch.equal(store_at(backend)["run@2"].read("w"), torch.ones(4, 2))


# ---- retries


def retried(fail, *, retries=2):
    """Save on three ranks that may retry; return outcomes and seconds."""
    backend = storage()

    def body(group):
        faults = FaultBackend(backend)
        mine = saver(faults, group, retries=retries, deadline_seconds=60.0)
        state = fail(group.rank, faults) or {"w": rows_of(torch.arange(12.0).reshape(6, 2), group)}
        began = time.monotonic()
        try:
            outcome = save(mine, 1, state).result()
        except Exception as error:  # noqa: BLE001 - looked at by the caller
            outcome = error
        return outcome, time.monotonic() - began

    outcomes = all_well(run_ranks(3, body))
    assert max(seconds for _, seconds in outcomes) < 20, outcomes
    return backend, [outcome for outcome, _ in outcomes]


def test_all_ranks_write_again_what_failed_on_one():
    def fail(rank, faults):
        if rank == 1:
            faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/", times=2)

    backend, reports = retried(fail)
    assert [report.attempts for report in reports] == [3, 3, 3]
    assert torch.equal(store_at(backend)["run@1"].read("w"), torch.arange(12.0).reshape(6, 2))


def test_when_the_attempts_are_used_up_all_ranks_raise():
    def fail(rank, faults):
        if rank == 2:
            faults.fail("put_if_absent", NoSpaceError("disk full"), prefix="packs/", times=100)

    _, outcomes = retried(fail)
    assert isinstance(outcomes[2], NoSpaceError)
    assert all("disk full" in str(outcomes[rank]) for rank in (0, 1))


def test_what_trying_again_cannot_help_is_not_tried_again_by_any_rank():
    """Only the coordinator saw that the copies differ; the others tried again and waited for it in vain."""
    _, outcomes = retried(lambda rank, _: {"c": torch.full((3,), rank)})
    assert isinstance(outcomes[0], MismatchError)
    assert all("copies differ" in str(outcomes[rank]) for rank in (1, 2))


def test_errors_that_are_not_of_storage_are_not_tried_again_by_any_rank():
    def fail(rank, faults):
        if rank == 1:
            faults.fail("put_if_absent", MemoryError("no memory"), prefix="packs/")

    _, outcomes = retried(fail)
    assert isinstance(outcomes[1], MemoryError)
    assert all("no memory" in str(outcomes[rank]) for rank in (0, 2))


# ---- memory


def test_a_budget_holds_for_a_state_many_times_its_size():
    backend = storage()
    state = {f"w{i}": torch.rand(25 * MIB // 4 // 64, 64) for i in range(8)}

    def body(group):
        mine = saver(backend, group, host_budget_bytes=32 * MIB)
        return [save(mine, step, state, blocking=step == 0).result() for step in range(2)]

    ((first, second),) = all_well(run_ranks(1, body))
    for report in (first, second):
        assert report.bytes_total >= 200 * MIB - 64 * 1024
        assert 0 < report.peak_host_bytes <= 32 * MIB
    assert second.bytes_deduplicated == second.bytes_total
    snapshot = store_at(backend)["run@1"]
    assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in state.items())


def test_a_tensor_larger_than_the_budget_is_saved():
    backend = storage()
    tensor = torch.rand(48 * MIB // 4)

    def body(group):
        mine = saver(backend, group, host_budget_bytes=32 * MIB, codec="zstd")
        return save(mine, 0, {"w": tensor}, blocking=False).result()

    (report,) = all_well(run_ranks(1, body))
    assert report.peak_host_bytes <= 32 * MIB
    assert torch.equal(store_at(backend)["run@0"].read("w"), tensor)


def test_a_save_that_fails_does_not_keep_the_memory_that_the_next_one_waits_for():
    """The buffers of a failed save never came back, and staging waited for them until the deadline."""
    faults = FaultBackend(storage())

    def body(group):
        mine = saver(faults, group, host_budget_bytes=32 * MIB, deadline_seconds=120.0)
        save(mine, 0, {"w": torch.rand(3)})
        small, large = torch.rand(32 * MIB // 4), torch.rand(60 * MIB // 4)
        error = NoSpaceError("disk full")
        faults.add(Rule(verb="put_if_absent", prefix="packs/", times=1, delay_seconds=3.0, error=error))
        first = save(mine, 1, {"w": small}, blocking=False)
        began = time.monotonic()
        second = save(mine, 2, {"w": large}, blocking=False)
        assert isinstance(first.outcome(), NoSpaceError)
        assert second.outcome() is None
        assert time.monotonic() - began < 60
        return save(mine, 3, {"w": large + 1}).result().peak_host_bytes

    (peak,) = all_well(run_ranks(1, body))
    assert peak <= 32 * MIB


# ---- background


def test_the_caller_may_change_its_tensors_once_a_background_save_returns():
    faults = FaultBackend(storage())
    faults.delay("put_if_absent", 0.2, prefix="packs/", times=100)
    tensor = torch.rand(500, 500)
    expected = tensor.clone()

    def body(group):
        handle = save(saver(faults, group), 1, {"w": tensor, "step": 1}, blocking=False)
        handle.wait_staged()
        for _ in range(50):
            tensor.add_(1)
        return handle.result()

    all_well(run_ranks(1, body))
    assert torch.equal(store_at(faults)["run@1"].read("w"), expected)


def test_background_saves_are_committed_in_order_and_bounded_in_number():
    faults = FaultBackend(storage())
    faults.delay("put_if_absent", 0.1, prefix="packs/", times=100)

    def body(group):
        mine = saver(faults, group, most_in_flight=2)
        handles = []
        for step in range(5):
            handles.append(save(mine, step, {"w": torch.full((4,), step)}, blocking=False))
            assert sum(not handle.done for handle in handles) <= 2
        mine.finish()
        return [handle.result().step for handle in handles]

    assert all_well(run_ranks(1, body)) == [[0, 1, 2, 3, 4]]
    assert [info.step for info in store_at(faults).snapshots("run")] == [0, 1, 2, 3, 4]


# ---- dedup


def test_a_base_must_be_there():
    def body(group):
        save(saver(storage(), group), 1, {"w": torch.ones(1)}, bases=("pretrained@3",))

    (error,) = run_ranks(1, body)
    assert isinstance(error, SnapshotNotFoundError)
    assert "pretrained@3" in str(error)


def test_a_base_of_another_run_is_deduplicated_against():
    backend, full = storage(), torch.rand(640, 512)

    def body(group):
        first = Saver(store_at(backend), "pretrained", group, SaveOptions(deadline_seconds=20.0))
        save(first, 0, {"model": rows_of(full, group)})
        report = save(saver(backend, group), 5, {"w": full}, bases=("pretrained@0",)).result()
        return report.bytes_written

    written = all_well(run_ranks(2, body))
    assert sum(written) <= 0.02 * full.nbytes


def test_errors_keep_their_class_whatever_went_wrong_in_the_background():
    for error in (ConflictError("marked"), CorruptionError("damaged")):
        faults = FaultBackend(storage())
        faults.fail("put_if_absent", error, prefix="manifests/")

        def body(group, faults=faults):
            save(saver(faults, group), 1, {"w": torch.ones(1)}, blocking=False).result()

        (outcome,) = run_ranks(1, body)
        assert outcome is error


def test_a_saver_that_nobody_closed_takes_its_thread_with_it():
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "vescale-save"}

    before = threads()
    dropped = saver(storage(), SoloGroup())
    handle = save(dropped, 1, {"weight": torch.arange(8.0)}, blocking=False)
    (thread,) = threads() - before
    del dropped
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    assert handle.result().step == 1  # what was under way was finished
