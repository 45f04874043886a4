"""C044 to C048: background saves that mixed steps, failed unseen, or were read before they ended."""

from __future__ import annotations

import threading
import uuid

import pytest
import torch
from torch import nn

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged
from tests.cases.worlds import RUN, all_well, checkpointer, store_on
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import AccessDeniedError, RankFailureError, SnapshotNotFoundError
from vescale_ckpt.saving.handle import SaveState
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend
from vescale_storage.wrappers.latency import Latency, LatencyBackend

SLOW = Latency(request_seconds=0.03)


def slow_store() -> vc.Store:
    return store_on(LatencyBackend(MemoryBackend(uuid.uuid4().hex), SLOW))


class TestC044ChangedWhileBeingSaved:
    @pytest.mark.parametrize("options", [{}, {"host_budget_bytes": 32 << 20}, {"pack_bytes": 1 << 20}])
    def test_the_snapshot_has_the_values_of_the_call(self, options):
        weight = torch.full((4_000_000,), 1.0)
        state = {"weight": weight, "nested": [weight.clone(), {"b": tagged(1000)}], "step": 1}
        store = slow_store()
        with vc.Checkpointer(store, RUN, options=vc.SaveOptions(**options)) as ckpt:
            handle = ckpt.save(1, state, blocking=False)
            assert handle.state >= SaveState.STAGED
            for _ in range(50):
                weight.add_(1)
                state["nested"][0].mul_(3)
                state["nested"][1]["b"].zero_()
            state["step"] = 51
            state["nested"].clear()
            handle.result()
        found = store[RUN].state_dict()
        assert same_bits(found["weight"], torch.full((4_000_000,), 1.0))
        assert same_bits(found["nested"][0], torch.full((4_000_000,), 1.0))
        assert same_bits(found["nested"][1]["b"], tagged(1000))
        assert found["step"] == 1

    @pytest.mark.parametrize("overlap", [True, False])
    def test_an_optimizer_that_goes_on_stepping(self, overlap):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(500, 700), nn.BatchNorm1d(700), nn.Linear(700, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def train() -> None:
            model(torch.randn(4, 500)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        train()
        store = slow_store()
        expected = {}
        with vc.Checkpointer(store, RUN, options=vc.SaveOptions(overlap_staging=overlap)) as ckpt:
            for step in range(3):
                expected[step] = {
                    "model": {k: v.clone() for k, v in model.state_dict().items()},
                    "exp_avg": [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()],
                }
                ckpt.save(step, {"model": model, "optimizer": optimizer}, blocking=False)
                train()
                train()
        for step, right in expected.items():
            found = store[f"{RUN}@{step}"].state_dict()
            assert all(same_bits(found["model"][key], value) for key, value in right["model"].items())
            names = [name for name, _ in model.named_parameters()]
            for name, value in zip(names, right["exp_avg"], strict=True):
                assert same_bits(found["optimizer"]["state"][name]["exp_avg"], value)

    def test_after_wait_staged_anything_may_change_anything(self):
        model = nn.Linear(1000, 1000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        before = model.weight.detach().clone()
        store = slow_store()
        with vc.Checkpointer(store, RUN) as ckpt:
            handle = ckpt.save(1, {"model": model, "optimizer": optimizer}, blocking=False)
            handle.wait_staged()
            model.weight.data.zero_()  # not by the optimizer
        assert same_bits(store[RUN].read("model.weight"), before)


class TestC046FailuresInTheBackground:
    def test_the_next_save_raises_it_with_its_step_and_cause_and_the_one_after_works(self):
        backend = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        store = store_on(backend)
        weight = torch.zeros(1000)
        ckpt = vc.Checkpointer(store, RUN)
        ckpt.save(0, {"weight": weight})
        backend.fail("put_if_absent", AccessDeniedError("the key has expired"), prefix="packs/")
        weight += 1
        first = ckpt.save(1, {"weight": weight}, blocking=False)
        first.wait_done()
        weight += 1
        with pytest.raises(RankFailureError) as caught:
            ckpt.save(2, {"weight": weight}, blocking=False)
        assert f"{RUN}@1" in str(caught.value)
        assert "the key has expired" in str(caught.value)
        assert isinstance(caught.value.__cause__, AccessDeniedError)
        assert store[RUN].step == 0
        weight += 1
        ckpt.save(3, {"weight": weight}, blocking=False).result()
        ckpt.close()
        assert store[RUN].step == 3
        assert store[RUN].read("weight").eq(3).all()
        assert [info.step for info in store.snapshots(RUN)] == [0, 3]

    @pytest.mark.parametrize("how", ["wait", "close", "load", "result"])
    def test_so_does_whatever_waits_next(self, how):
        backend = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        store = store_on(backend)
        ckpt = vc.Checkpointer(store, RUN)
        ckpt.save(0, {"w": tagged(10)})
        backend.fail("put_if_absent", AccessDeniedError("no more"), prefix="packs/")
        handle = ckpt.save(1, {"w": tagged(11)}, blocking=False)
        target = {"w": torch.zeros(10)}
        waits = {"wait": ckpt.wait, "close": ckpt.close, "load": lambda: ckpt.load(target), "result": handle.result}
        with pytest.raises(AccessDeniedError, match="no more"):
            waits[how]()
        ckpt.wait()  # told once
        ckpt.save(2, {"w": tagged(12)})
        assert store[RUN].step == 2

    def test_on_all_ranks_where_one_failed(self):
        inner = MemoryBackend(uuid.uuid4().hex)
        bad = FaultBackend(inner)
        bad.fail("put_if_absent", AccessDeniedError("rank 1's key has expired"), prefix="packs/", skip=1)

        def body(group):
            store = store_on(bad if group.rank == 1 else inner)
            ckpt = checkpointer(store, group, deadline_seconds=20)
            for step in (0, 1):
                rows = torch.full((5, 3), float(10 * step + group.rank))
                state = {"w": vc.ShardedView((10, 3), torch.float32, [((5 * group.rank, 0), rows)])}
                ckpt.save(step, state, blocking=False).wait_done()
            try:
                ckpt.save(2, state, blocking=False)
            except RankFailureError as error:
                told = str(error)
            ckpt.save(3, state, blocking=False).result()
            ckpt.close()
            return told

        told = all_well(run_ranks(2, body))
        assert all(f"{RUN}@1" in message and "has expired" in message for message in told), told
        assert store_on(inner)[RUN].step == 3

    def test_a_failure_may_be_only_warned_of(self, caplog):
        backend = FaultBackend(MemoryBackend(uuid.uuid4().hex))
        ckpt = vc.Checkpointer(store_on(backend), RUN, options=vc.SaveOptions(on_failure="warn"))
        ckpt.save(0, {"w": tagged(10)})
        backend.fail("put_if_absent", AccessDeniedError("no more"), prefix="packs/")
        ckpt.save(1, {"w": tagged(11)}, blocking=False).wait_done()
        ckpt.save(2, {"w": tagged(12)})
        ckpt.close()
        assert "no more" in caplog.text


class TestC048LoadsAndSavesThatCross:
    def test_a_load_waits_for_the_save_of_its_own_checkpointer(self):
        store = slow_store()
        with vc.Checkpointer(store, RUN) as ckpt:
            ckpt.save(1, {"w": tagged(1000)}, blocking=False)
            target = {"w": torch.zeros(1000)}
            assert ckpt.load(target, 1).step == 1
            assert same_bits(target["w"], tagged(1000))

    def test_another_checkpointer_is_told_that_it_is_not_there_or_gets_all_of_it(self):
        store = slow_store()
        with vc.Checkpointer(store, RUN) as ckpt, vc.Checkpointer(store, RUN) as other:
            handle = ckpt.save(1, {"w": tagged(1000)}, blocking=False)
            target = {"w": torch.zeros(1000)}
            with pytest.raises(SnapshotNotFoundError):
                other.load(target, 1)
            handle.result()
            other.load(target, 1)
            assert same_bits(target["w"], tagged(1000))

    def test_saves_are_ordered_and_none_is_lost(self):
        store = slow_store()
        elsewhere = slow_store()
        with vc.Checkpointer(store, RUN) as ckpt, vc.Checkpointer(elsewhere, RUN) as other:
            handles = [ckpt.save(step, {"w": tagged(1000) + step}, blocking=False) for step in (1, 2)]
            handles.append(other.save(3, {"w": tagged(1000) + 3}, blocking=False))
            handles += [ckpt.save(step, {"w": tagged(1000) + step}, blocking=False) for step in (4, 5)]
            assert [handle.result().step for handle in handles] == [1, 2, 3, 4, 5]
        assert [info.step for info in store.snapshots(RUN)] == [1, 2, 4, 5]
        created = [info.created_seconds for info in store.snapshots(RUN)]
        assert created == sorted(created)
        assert [info.step for info in elsewhere.snapshots(RUN)] == [3]
        for step in (1, 2, 4, 5):
            assert same_bits(store[f"{RUN}@{step}"].read("w"), tagged(1000) + step)

    def test_two_threads_that_save_two_runs_to_one_store(self):
        store = slow_store()
        errors = []

        def train(run: str) -> None:
            try:
                with vc.Checkpointer(store, run) as ckpt:
                    for step in range(3):
                        ckpt.save(step, {"w": torch.full((1000,), float(hash(run) % 1000 + step))}, blocking=False)
            except BaseException as error:  # noqa: BLE001 -- for the test's own thread
                errors.append(error)

        threads = [threading.Thread(target=train, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not errors
        for run in ("one", "two"):
            assert store[run].read("w")[0] == hash(run) % 1000 + 2
