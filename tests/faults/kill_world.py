"""Worlds of two ranks that save until they are killed; run as a script, so that each trial is a fork and not an import.

The parent imports torch once and starts nothing; every trial forks two ranks, which open the store afresh, go on from
the newest snapshot, and save step after step until a SIGKILL hits one of them at a random moment. Then a third fork
reads the newest snapshot whole. One JSON line a trial goes to standard output.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import select
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt as vc

WORLD = 2
RUN = "killed"
SHAPES = ((300, 700), (5,), (1000, 64))
FIRST_SAVE_SECONDS = 60.0


def value_of(step: int, number: int) -> torch.Tensor:
    """Return what tensor ``number`` holds at a step: every element tells the step."""
    shape = SHAPES[number]
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1e6 * step


def rank_main(rank: int, url: str, options: dict, rendezvous: str, report: int, seed: int) -> None:
    """Save steps one after another, telling the parent of each one that is committed."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    store = vc.open_store(url, storage_options=options)
    checkpointer = vc.Checkpointer(store, RUN)
    target = {str(n): distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for n, shape in enumerate(SHAPES)}
    state = {"model": target, "step": 0, "rng": vc.PerRank(rank)}
    newest = store.newest(RUN) if rank == 0 else None
    found = [newest.step if newest is not None else -1]
    dist.broadcast_object_list(found)
    step = found[0]
    if step >= 0:
        checkpointer.load(state)
    os.write(report, f"{rank} ready {step}\n".encode())
    while True:
        step += 1
        state = {
            "model": {str(n): distribute_tensor(value_of(step, n), mesh, [Shard(0)]) for n in range(len(SHAPES))},
            "step": step,
            "rng": vc.PerRank(rank),
        }
        checkpointer.save(step, state, blocking=step % 2 == 0).result()
        os.write(report, f"{rank} saved {step}\n".encode())


def check_main(url: str, options: dict) -> str:
    """Return what is wrong with the newest snapshot, or its step."""
    torch.set_num_threads(1)
    store = vc.open_store(url, storage_options=options)
    if store.newest(RUN) is None:
        return "-1"
    snapshot = store[RUN]
    state = snapshot.state_dict()
    step = snapshot.step
    if state["step"] != step or state["rng"] != {0: 0, 1: 1}:
        return f"values of step {state['step']} and ranks {state['rng']} in {snapshot.name}"
    for n in range(len(SHAPES)):
        if not torch.equal(state["model"][str(n)], value_of(step, n)):
            return f"tensor {n} of {snapshot.name} is not that of its step"
    return str(step)


def fork(body, *args) -> int:
    """Run ``body`` in a child and return its pid; the child never returns."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body(*args)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def lines_until(reader: int, seconds: float, enough) -> list[list[str]]:
    """Return the lines that come within ``seconds``, or until ``enough(lines)``."""
    data, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            chunk = os.read(reader, 1 << 16)
            if not chunk:
                break
            data += chunk
        if enough([line.split() for line in data.decode().splitlines()]):
            break
    return [line.split() for line in data.decode().splitlines()]


def killed_world(url: str, options: dict, delay_seconds: float, victim: int, seed: int) -> list[list[str]]:
    """Run one world, kill one rank after a delay and the other a moment later; return what the ranks reported."""
    reader, writer = os.pipe()
    with tempfile.NamedTemporaryFile(delete=False) as rendezvous:
        pass
    pathlib.Path(rendezvous.name).unlink()
    pids = [fork(rank_main, rank, url, options, rendezvous.name, writer, seed + rank) for rank in range(WORLD)]
    os.close(writer)
    lines = lines_until(reader, FIRST_SAVE_SECONDS, lambda lines: len(lines) >= WORLD)
    lines += lines_until(reader, delay_seconds, lambda _: False)
    os.kill(pids[victim], signal.SIGKILL)
    lines += lines_until(reader, 0.05, lambda _: False)
    for pid in pids:
        if pid != pids[victim]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    lines += lines_until(reader, 0.2, lambda _: False)
    os.close(reader)
    return lines


def found_by_another_process(url: str, options: dict) -> str:
    """Return what ``check_main`` says in a process of its own."""
    reader, writer = os.pipe()
    pid = fork(lambda: os.write(writer, check_main(url, options).encode()))
    os.close(writer)
    answer = b""
    while chunk := os.read(reader, 1 << 16):
        answer += chunk
    os.close(reader)
    os.waitpid(pid, 0)
    return answer.decode() or "the check died"


def trial(url: str, options: dict, delay_seconds: float, victim: int, seed: int) -> dict:
    """Run and kill one world, and look at what is left."""
    lines = killed_world(url, options, delay_seconds, victim, seed)
    acknowledged = max([int(words[2]) for words in lines], default=-1)
    found = found_by_another_process(url, options)
    problem = ""
    if sum(words[1] == "ready" for words in lines) != WORLD:
        problem = f"the ranks did not get ready: {lines}"
    elif not found.lstrip("-").isdigit():
        problem = found
    elif not acknowledged <= int(found) <= acknowledged + 1:
        problem = f"the newest is {found}, but {acknowledged} was reported committed"
    saves = sum(words[1] == "saved" for words in lines)
    return {"acknowledged": acknowledged, "found": found, "saves": saves, "problem": problem}


def main() -> None:
    """Run trials: url, JSON options, number, seed, longest delay in seconds."""
    url, options, number, seed, longest = sys.argv[1:6]
    chance = random.Random(int(seed))
    for i in range(int(number)):
        outcome = trial(url, json.loads(options), chance.uniform(0, float(longest)), chance.randrange(WORLD), 1000 * i)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
