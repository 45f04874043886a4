"""Savers, loaders, collections and pruning at once on one store; run as a script with: folder, seconds, grace seconds.

Each role is a process of its own, forked before anything is started. Every process prints one JSON line at its end.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
import time
import traceback
from typing import TYPE_CHECKING

import torch

import vescale_ckpt as vc
from vescale_ckpt.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

SAVERS = 4
LOADERS = 2
KEPT = 3
ROWS = 400


def value_of(run: int, step: int) -> dict:
    """Return the state of a run at a step: a part that never changes, one that all runs share, one that always does."""
    frozen = torch.arange(ROWS * 500, dtype=torch.float32).reshape(ROWS, 500)
    return {
        "frozen": frozen,
        "own": frozen[: ROWS // 4] + 1000.0 * run,
        "new": torch.full((300, 400), 1.0 * step),
        "step": step,
    }


def same(state: dict, run: int, step: int) -> bool:
    """Return whether a loaded state is that of its run and step, to the bit."""
    wanted = value_of(run, step)
    return state["step"] == step and all(torch.equal(state[k], wanted[k]) for k in ("frozen", "own", "new"))


def save(folder: str, end: float, run: int) -> dict:
    """Save steps of one run until the end; each goes in three ways by turns."""
    store = vc.open_store(folder)
    options = vc.SaveOptions(dedup_across_runs=run % 2 == 0)
    checkpointer = vc.Checkpointer(store, f"run-{run}", options=options)
    step = 0
    while time.monotonic() < end:
        step += 1
        checkpointer.save(step, value_of(run, step), blocking=step % 3 != 0)
        if step % 10 == 0:
            checkpointer.wait()
            store.tag(f"run-{run}", step, f"tenth-{step}")
    checkpointer.close()
    return {"saves": step}


def load(folder: str, end: float, seed: int) -> dict:
    """Load snapshots of any run until the end; only that one is gone already is no fault."""
    store, chance = vc.open_store(folder), random.Random(seed)
    loads = gone = 0
    while time.monotonic() < end:
        run = chance.randrange(SAVERS)
        try:
            listed = store.snapshots(f"run-{run}")
            step = chance.choice(listed).step
            snapshot = store[f"run-{run}@{step}"]
        except NotFoundError:
            gone += 1
            time.sleep(0.01)
            continue
        if not same(snapshot.state_dict(), run, step):
            return {"problem": f"{snapshot.name} is not what was saved"}
        loads += 1
    return {"loads": loads, "gone": gone}


def clean(folder: str, end: float, grace_seconds: float) -> dict:
    """Prune every run and collect, again and again."""
    store = vc.open_store(folder)
    policy = vc.RetentionPolicy(keep_last=KEPT)
    pruned = collected = 0
    while time.monotonic() < end:
        for run in range(SAVERS):
            try:
                pruned += len(store.prune(f"run-{run}", policy).deleted)
            except NotFoundError:
                continue  # the run has not begun
        store.gc(grace_seconds)
        collected += 1
        time.sleep(0.5)
    return {"pruned": pruned, "collections": collected}


def fork(body: Callable[[], dict]) -> int:
    """Run ``body`` in a child that prints its outcome as one line."""
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            outcome = body()
        except BaseException:  # noqa: BLE001 -- the parent reads it
            outcome = {"problem": traceback.format_exc()[-3000:]}
        os.write(1, (json.dumps(outcome) + "\n").encode())
        os._exit(0)
    return pid


def main() -> None:
    """Run all roles to the end, then look at everything that is left."""
    folder, seconds, grace_seconds = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    end = time.monotonic() + seconds
    pids = [fork(lambda run=run: save(folder, end, run)) for run in range(SAVERS)]
    while not pathlib.Path(folder, "store.json").exists():
        time.sleep(0.05)
    pids += [fork(lambda seed=seed: load(folder, end, seed)) for seed in range(LOADERS)]
    pids += [fork(lambda: clean(folder, end, grace_seconds)) for _ in range(2)]
    for pid in pids:
        os.waitpid(pid, 0)
    store = vc.open_store(folder)
    left = 0
    for run in range(SAVERS):
        for info in store.snapshots(f"run-{run}"):
            snapshot = store[info.name]
            if not same(snapshot.state_dict(), run, info.step) or not snapshot.verify().ok:
                print(json.dumps({"problem": f"at the end {info.name} is not what was saved"}))
            left += 1
    print(json.dumps({"left": left}), flush=True)


if __name__ == "__main__":
    main()
