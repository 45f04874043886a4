"""Small real stores for the tests of collecting."""

from __future__ import annotations

import time
import uuid

import torch

import vescale_ckpt as vc
from vescale_storage import loop
from vescale_storage.backends.memory import MemoryBackend

HOUR = 3600.0
NUM_VALUES = 1024


def tensor(seed: int, num_values: int = NUM_VALUES) -> torch.Tensor:
    """Return values that no other seed has."""
    return torch.arange(num_values, dtype=torch.int64) + seed * 1_000_000


class Runs:
    """A store in memory, what was saved to it, and the hours that have passed."""

    def __init__(self) -> None:
        self.inner = MemoryBackend(uuid.uuid4().hex)
        self.store = vc.Store(self.inner, exists=False)
        self.saved: dict[tuple[str, int], dict[str, int]] = {}
        self.hours = 0.0

    @property
    def now(self) -> float:
        return time.time() + self.hours * HOUR

    def on(self, backend) -> vc.Store:
        """Return the same store over a wrapper of its back end."""
        return vc.Store(backend, exists=True)

    def save(self, step: int, run: str = "run", *, store=None, base=None, options=None, **seeds: int) -> vc.SaveReport:
        """Save one tensor for each name, filled by its seed."""
        state = {name: tensor(seed) for name, seed in seeds.items()}
        with vc.Checkpointer(store or self.store, run, options=options) as checkpointer:
            report = checkpointer.save(step, state, base=base).result()
        self.saved[run, step] = seeds
        return report

    def delete(self, step: int, run: str = "run") -> None:
        self.store.delete(run, step)
        del self.saved[run, step]

    def gc(self, *, store=None, grace_seconds=HOUR, **options) -> vc.GcReport:
        return (store or self.store).gc(grace_seconds, now=self.now, **options)

    def collect_all(self, **options) -> None:
        """Mark, wait and delete, until nothing is left to do."""
        for _ in range(4):
            self.hours += 3
            self.gc(**options)

    def check(self) -> None:
        """Read every snapshot that should be there, whole and verified, as by a process that has just begun."""
        store = vc.Store(self.inner, exists=True)
        found = {(run, info.step) for run in store.runs() for info in store.snapshots(run)}
        assert found == set(self.saved)
        for (run, step), seeds in self.saved.items():
            snapshot = store[f"{run}@{step}"]
            report = snapshot.verify()
            assert report.ok, report.problems
            state = snapshot.state_dict()
            assert set(state) == set(seeds)
            for name, seed in seeds.items():
                assert torch.equal(state[name], tensor(seed)), (run, step, name)

    def keys(self, prefix: str = "") -> list[str]:
        async def listed():
            return [info.key async for info in self.inner.list(prefix)]

        return loop.run(listed())

    def packs(self, step: int, run: str = "run") -> set[str]:
        """Return the names of the packs that a snapshot refers to."""
        store = vc.Store(self.inner, exists=True)
        return {pack.name for pack in store[f"{run}@{step}"].manifest.packs}

    def needed(self) -> set[str]:
        return {name for run, step in self.saved for name in self.packs(step, run)}

    def stored(self) -> set[str]:
        return {key.rpartition("/")[2] for key in self.keys("packs/")}
