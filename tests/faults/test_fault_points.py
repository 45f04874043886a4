"""A rank killed at every numbered operation of a 2-rank save, on disk and on S3: old or new, whole, and no leak."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

import vescale_ckpt as vc
from tests.cases.worlds import RUN, all_well, checkpointer, save, store_on
from tests.distributed.threads import run_ranks
from vescale_storage import loop
from vescale_storage.backends import open_backend
from vescale_storage.keys import pack_key
from vescale_storage.wrappers.faults import FaultBackend, When
from vescale_storage.wrappers.retry import RetryBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_storage.backend import Backend

WORLD = 2
ROWS = 300
FEWEST_POINTS = 50


def _state(step: int, rank: int) -> dict[str, Any]:
    rows = torch.arange(ROWS * 400, dtype=torch.float32).reshape(ROWS, 400) + 1e6 * step
    per_rank = ROWS // WORLD
    return {
        "w": vc.ShardedView((ROWS, 400), torch.float32, [((rank * per_rank, 0), rows[rank * per_rank :][:per_rank])]),
        "frozen": torch.arange(4000.0),
        "step": step,
        "rng": vc.PerRank(rank + step),
    }


def _check_whole(store: vc.Store, step: int) -> None:
    found = store[f"{RUN}@{step}"].state_dict()
    assert torch.equal(found["w"], torch.arange(ROWS * 400, dtype=torch.float32).reshape(ROWS, 400) + 1e6 * step)
    assert found["step"] == step
    assert found["rng"] == {rank: rank + step for rank in range(WORLD)}


def _save_step_2(backends: list[Backend], deadline_seconds: float) -> list[Any]:
    def body(group: Any) -> vc.SaveReport:
        store = store_on(backends[group.rank], exists=True)
        return checkpointer(store, group, deadline_seconds=deadline_seconds).save(2, _state(2, group.rank)).result()

    return run_ranks(WORLD, body)


async def _keys(backend: Backend, prefix: str) -> set[str]:
    return {info.key async for info in backend.list(prefix)}


class _Place:
    """A back end with step 1 in it, made anew for every trial."""

    def __init__(self, make: Callable[[], Backend], tick_seconds: float = 0.0) -> None:
        self._make = make
        self._tick_seconds = tick_seconds
        """Of the storage's clock: what is of this tick is young."""

    def fresh(self) -> Backend:
        backend = self._make()
        save(store_on(backend), WORLD, lambda rank: _state(1, rank))
        return backend

    def points(self) -> list[tuple[int, int, When]]:
        """Return every (rank, operation, before or after) of a save of step 2 that goes well."""
        inner = self.fresh()
        backends = [FaultBackend(inner) for _ in range(WORLD)]
        all_well(_save_step_2(list(backends), 60))
        loop.run(inner.close())
        return [
            (rank, operation.number, when)
            for rank, backend in enumerate(backends)
            for operation in backend.operations
            for when in (When.BEFORE, When.AFTER)
        ]

    def trial(self, point: tuple[int, int, When]) -> int:
        """Kill a rank at one point; return the newest step that is left."""
        victim, number, when = point
        inner = self.fresh()
        backends: list[Backend] = [FaultBackend(inner) for _ in range(WORLD)]
        backends[victim] = FaultBackend(inner, kill_at=number, kill_when=when)
        _save_step_2(backends, deadline_seconds=3.0)
        store = store_on(inner, exists=True)
        newest = store[RUN].step
        for step in range(1, newest + 1):
            _check_whole(store, step)
        save(store, WORLD, lambda rank: _state(3, rank), step=3)
        _check_whole(store, 3)
        self._check_reclaimed(store)
        loop.run(inner.close())
        return newest

    def _check_reclaimed(self, store: vc.Store) -> None:
        """Require that one collection leaves what snapshots refer to, all of it and nothing else."""
        time.sleep(self._tick_seconds)
        store.gc(grace_seconds=0)
        needed = {pack_key(pack.name) for info in store.snapshots(RUN) for pack in store[info.name].manifest.packs}
        assert loop.run(_keys(store.backend, "packs/")) == needed
        assert len(loop.run(_keys(store.backend, "manifests/"))) == len(store.snapshots(RUN))
        assert loop.run(_keys(store.backend, "txn/")) == set()
        assert list(loop.run(store.backend.leftovers())) == []
        for info in store.snapshots(RUN):
            _check_whole(store, info.step)


def _check_every_point(place: _Place, num_at_once: int) -> None:
    points = place.points()
    assert len(points) >= FEWEST_POINTS
    with ThreadPoolExecutor(num_at_once) as trials:  # they mostly wait for the rank that will never come
        assert set(trials.map(place.trial, points)) == {1, 2}, "no kill fell before the commit, or none after it"


@pytest.mark.timeout(900)
def test_every_point_on_local_disk(tmp_path):
    _check_every_point(_Place(lambda: open_backend(tmp_path / uuid.uuid4().hex)), 8)


@pytest.mark.s3
@pytest.mark.timeout(900)
def test_every_point_on_s3(s3_url):
    def make() -> Backend:
        return RetryBackend(open_backend(f"{s3_url.url}/{uuid.uuid4().hex}", s3_url.storage_options))

    _check_every_point(_Place(make, tick_seconds=1.1), 4)
