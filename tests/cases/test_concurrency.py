"""C080 to C084: writers of one object, forks, and ranks that bring different keys."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
import uuid

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import vescale_ckpt as vc
from tests.cases.inputs import same_bits, tagged
from tests.cases.worlds import RUN, load, memory_store, save, store_on, try_load, try_save
from tests.distributed.threads import run_ranks
from vescale_ckpt.errors import ConflictError, MismatchError, RankFailureError, StateError, VeScaleError
from vescale_storage.backends.memory import MemoryBackend
from vescale_storage.wrappers.faults import FaultBackend

PATIENCE_SECONDS = 60.0


class TestC080OneWriterPerObject:
    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rows_of_four_ranks_in_one_tile(self, interleaved):
        full = tagged(16, 7)
        store = memory_store()

        def rows(rank: int) -> list[int]:
            return [r for r in range(16) if (r % 4 if interleaved else r // 4) == rank]

        def state(rank: int) -> dict:
            pieces = [((r, 0), full[r : r + 1].clone()) for r in rows(rank)]
            return {"w": vc.ShardedView((16, 7), torch.float32, pieces)}

        for step in range(3):
            save(store, 4, state, step=step)
        assert same_bits(store[RUN].read("w"), full)
        assert store[RUN].tensors()["w"].num_chunks >= 4, "a part of a tile for each rank"

    def test_no_object_is_ever_written_twice_or_changed(self):
        inner = MemoryBackend(uuid.uuid4().hex)
        backends = [FaultBackend(inner) for _ in range(4)]

        def body(group):
            ckpt = vc.Checkpointer(store_on(backends[group.rank]), RUN)
            ckpt._group_made = group
            for step in range(2):
                rows = tagged(4, 7, start=100 * group.rank + step)
                ckpt.save(step, {"w": vc.ShardedView((16, 7), torch.float32, [((4 * group.rank, 0), rows)])})

        run_ranks(4, body)
        writes = [op for backend in backends for op in backend.operations if op.verb.startswith("put")]
        data = [op.key for op in writes if op.key.startswith(("packs/", "manifests/", "refs/"))]
        assert len(data) == len(set(data)) == 2 * (4 + 1 + 1)
        assert all(op.verb == "put_if_absent" for op in writes if op.key in set(data))

    def test_many_writers_of_one_step_get_a_version_each(self):
        store = memory_store()
        save(store, 1, lambda _: {"w": tagged(5)}, step=0)

        def write(number: int) -> int:
            own = vc.open_store(store.url)
            return vc.Checkpointer(own, RUN).save(7, {"w": torch.full((5,), float(number))}).result().version

        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            versions = list(threads.map(write, range(6)))
        assert sorted(versions) == [1, 2, 3, 4, 5, 6]
        assert store[f"{RUN}@7"].read("w")[0] == versions.index(6)


def use(url: str, number: int) -> bool:
    """Save and load in a child; what it returns says that both were right."""
    state = {"w": torch.full((1000,), float(number))}
    with vc.open_store(url) as store, vc.Checkpointer(store, f"child-{number}") as ckpt:
        ckpt.save(1, state)
        target = {"w": torch.zeros(1000)}
        ckpt.load(target)
        parent = store["parent"].read("w")
    return bool(target["w"].eq(number).all()) and bool(parent.eq(5).all())


class FromStore(Dataset):
    """Reads from a store that was opened before the fork."""

    def __init__(self, store: vc.Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.store["parent"].read("w", slice(index, index + 1))


class TestC082Forks:
    @pytest.fixture
    def parent(self, tmp_path):
        """A store that this process has used: its loop, threads and connections are alive."""
        store = vc.open_store(tmp_path / "store")
        ckpt = vc.Checkpointer(store, "parent")
        ckpt.save(1, {"w": torch.full((1000,), 5.0)}, blocking=False).result()
        assert store["parent"].read("w").eq(5).all()
        yield store, ckpt
        ckpt.close()

    def test_children_open_it_again(self, parent):
        store, _ = parent
        with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            found = [pool.submit(use, store.url, number) for number in range(4)]
            assert all(f.result(PATIENCE_SECONDS) for f in found)

    def test_children_use_the_parents_or_are_told_at_once(self, parent):
        store, ckpt = parent

        def child(connection) -> None:
            for attempt in (lambda: store["parent"].read("w"), lambda: ckpt.save(2, {"w": torch.zeros(1000)})):
                try:
                    attempt()
                    connection.send("worked")
                except VeScaleError as error:
                    connection.send(f"{type(error).__name__}: {error}")
            connection.close()

        ours, theirs = multiprocessing.get_context("fork").Pipe()
        process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
        process.start()
        answers = []
        for _ in range(2):
            assert ours.poll(PATIENCE_SECONDS), "the child hangs"
            answers.append(ours.recv())
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
        assert all(a == "worked" or a.startswith(StateError.__name__) for a in answers), answers
        assert "make a Checkpointer in the child" in answers[1]
        assert ckpt.save(3, {"w": torch.full((1000,), 5.0)}).result().step == 3, "the parent goes on"

    def test_a_data_loader_with_workers(self, parent):
        store, _ = parent
        loader = DataLoader(FromStore(store), batch_size=2, num_workers=2, timeout=PATIENCE_SECONDS)
        for _ in range(2):
            assert torch.cat(list(loader)).flatten().tolist() == [5.0] * 6
        assert store["parent"].read("w").eq(5).all()


class TestC084KeysThatDiffer:
    def test_an_extra_key_on_one_rank_is_an_error_on_all_within_seconds(self):
        began = time.monotonic()
        outcomes = try_save(
            memory_store(), 3, lambda rank: {"w": tagged(3), "b": 1} | ({"sidecar": 5} if rank == 0 else {})
        )
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert all("sidecar" in str(outcome) for outcome in outcomes)
        assert time.monotonic() - began < 10

    def test_a_key_that_one_rank_lacks_too(self):
        outcomes = try_save(
            memory_store(), 3, lambda rank: {"w": tagged(3)} if rank == 1 else {"w": tagged(3), "v": tagged(2)}
        )
        assert all(isinstance(outcome, MismatchError | RankFailureError) for outcome in outcomes)
        assert all("'v'" in str(outcome) for outcome in outcomes)

    def test_another_order_is_no_difference(self):
        names = ["a", "b", "c", "d"]

        def order(rank: int) -> list[str]:
            return names[rank:] + names[:rank]

        def state(rank: int, value: float) -> dict:
            rows = {name: torch.full((2, 3), value * (ord(name) + rank)) for name in order(rank)}
            return {
                name: vc.ShardedView((8, 3), torch.float32, [((2 * rank, 0), local)]) for name, local in rows.items()
            } | {"nested": {name: ord(name) for name in reversed(order(rank))}}

        store = memory_store()
        save(store, 4, lambda rank: state(rank, 1.0))
        for name in names:
            right = torch.cat([torch.full((2, 3), float(ord(name) + rank)) for rank in range(4)])
            assert same_bits(store[RUN].read(name), right)
        targets = [state(rank, 0.0) for rank in range(4)]
        load(store, 4, lambda rank: targets[rank])
        for rank, target in enumerate(targets):
            for name in names:
                assert target[name].pieces[0][1].eq(ord(name) + rank).all()

    def test_a_load_that_asks_for_different_keys_is_an_error_on_all_where_one_is_missing(self):
        store = memory_store()
        save(store, 1, lambda _: {"w": tagged(3)})
        targets = [{"w": torch.zeros(3)} | ({"odd": torch.zeros(2)} if rank == 1 else {}) for rank in range(3)]
        outcomes = try_load(store, 3, lambda rank: targets[rank])
        assert all(isinstance(outcome, MismatchError) for outcome in outcomes)
        assert all("'odd'" in str(outcome) for outcome in outcomes)
        assert not any(target["w"].any() for target in targets)

    def test_ranks_that_save_different_steps_or_runs_are_told(self):
        store = memory_store()

        def body(group):
            ckpt = vc.Checkpointer(store, RUN)
            ckpt._group_made = group
            return ckpt.save(group.rank, {"w": tagged(3)})

        outcomes = run_ranks(2, body)
        assert all(isinstance(outcome, MismatchError | ConflictError) for outcome in outcomes)
        assert "step" in str(outcomes[0])

    def test_a_rank_that_cannot_prepare_tells_the_others(self):
        began = time.monotonic()
        outcomes = try_save(memory_store(), 3, lambda rank: {"w": tagged(3), "x": object() if rank == 2 else 1})
        assert all(isinstance(outcome, VeScaleError) for outcome in outcomes)
        assert "'x'" in str(outcomes[2])
        assert "rank 2" in str(outcomes[0])
        assert time.monotonic() - began < 10
