"""Worlds of three ranks of which one sleeps for ever, dies, or raises in one phase; run as a script that forks them.

The parent imports torch once. Each world is a fork that forks its ranks: they save once, then one of them fails in a
phase of the next save or load; what the others are told, and when, and whether the next save works, goes to a file.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

import torch
import torch.distributed as dist

import vescale_ckpt as vc
from vescale_storage.wrappers.wrapper import WrapperBackend

WORLD = 3
RUN = "run"
DEADLINE_SECONDS = 4.0
LIMIT_SECONDS = 60.0
MODES = ("sleeps", "dies", "raises")
PHASES = {
    # phase: who fails
    "capture": 2,
    "write": 1,
    "fragment": 2,
    "ref": 0,
    "load plan": 1,
    "load read": 2,
    "load finish": 1,
}
VERBS = {
    "write": ("put_if_absent", "packs/"),
    "fragment": ("put_if_absent", "txn/"),
    "ref": ("put_if_absent", "refs/"),
    "load read": ("get_into", "packs/"),
}


def fail(mode: str) -> None:
    """Sleep for ever, die, or raise."""
    if mode == "sleeps":
        time.sleep(10 * LIMIT_SECONDS)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("it was told to raise")


class Failing(WrapperBackend):
    """Fails at the first operation of a kind, once."""

    def __init__(self, inner, verb: str, prefix: str, mode: str) -> None:
        super().__init__(inner)
        self._verb, self._prefix, self._mode = verb, prefix, mode

    def _pass(self, verb: str, key: str) -> None:
        if self._mode and verb == self._verb and key.startswith(self._prefix):
            mode, self._mode = self._mode, ""
            fail(mode)

    async def put_if_absent(self, key, payload):
        self._pass("put_if_absent", key)
        await self.inner.put_if_absent(key, payload)

    async def get_into(self, key, offset, out):
        self._pass("get_into", key)
        await self.inner.get_into(key, offset, out)


class Theirs:
    """An object of the state that fails when it is asked or told."""

    def __init__(self, asked: str = "", told: str = "") -> None:
        self.asked, self.told = asked, told

    def state_dict(self) -> dict:
        if self.asked:
            fail(self.asked)
        return {"a": 1}

    def load_state_dict(self, state: dict) -> None:
        assert state == {"a": 1}
        if self.told:
            fail(self.told)


def state_of(rank: int, step: int, theirs: Theirs | None = None) -> dict:
    rows = torch.full((40, 50), float(10 * step + rank))
    view = vc.ShardedView((40 * WORLD, 50), torch.float32, [((40 * rank, 0), rows)])
    return {"w": view, "step": step, "theirs": theirs or Theirs()}


def rank_main(folder: pathlib.Path, phase: str, mode: str, rank: int) -> None:
    """Be one rank of a world."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=WORLD)
    others = [other for other in range(WORLD) if other != PHASES[phase]]
    survivors = dist.new_group(others)
    options = vc.SaveOptions(deadline_seconds=DEADLINE_SECONDS)
    store = vc.open_store(folder / "store")
    with vc.Checkpointer(store, RUN, options=options) as ckpt:
        ckpt.save(1, state_of(rank, 1))
    theirs = Theirs()
    if rank == PHASES[phase]:
        if phase in VERBS:
            store = vc.Store(Failing(store.backend, *VERBS[phase], mode), exists=True)
        elif phase == "load finish":
            theirs.told = mode
        else:
            theirs.asked = mode
    ckpt = vc.Checkpointer(store, RUN, options=options)
    began = time.monotonic()
    told = ""
    try:
        if phase.startswith("load"):
            ckpt.load(state_of(rank, 0, theirs))
        else:
            ckpt.save(2, state_of(rank, 2, theirs))
    except Exception as error:  # noqa: BLE001 - the answer
        told = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    again = next_save(folder, None if mode == "raises" else survivors)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"told": told, "seconds": seconds, "again": again}))


def next_save(folder: pathlib.Path, group: dist.ProcessGroup | None) -> int:
    """Save with the ranks that are left, and return the newest step."""
    store = vc.open_store(folder / "store")
    with vc.Checkpointer(store, RUN, process_group=group, options=vc.SaveOptions(deadline_seconds=30.0)) as ckpt:
        ckpt.save(3, {"after": torch.ones(3)})
    return store[RUN].step


def world(folder: pathlib.Path, phase: str, mode: str) -> None:
    """Fork the ranks of a world, wait for those that live, and kill what is left."""
    pids = {}
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            try:
                rank_main(folder, phase, mode, rank)
            finally:
                sys.stderr.flush()
                os._exit(0)
        pids[rank] = pid
    lives = [rank for rank in range(WORLD) if mode == "raises" or rank != PHASES[phase]]
    end = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < end and not all((folder / f"rank-{rank}.json").exists() for rank in lives):
        time.sleep(0.05)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main(folder: str, at_once: int) -> None:
    """Run all worlds, a few at a time: they mostly wait."""
    running: set[int] = set()
    for mode in MODES:
        for phase in PHASES:
            if len(running) >= at_once:
                running.discard(os.wait()[0])
            place = pathlib.Path(folder) / f"{mode} {phase}"
            place.mkdir()
            pid = os.fork()
            if pid == 0:
                try:
                    world(place, phase, mode)
                finally:
                    os._exit(0)
            running.add(pid)
    for _ in list(running):
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
