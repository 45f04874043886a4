"""What four ranks do that cannot agree, over real connections: every case must end on all of them within seconds."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vescale_ckpt as vc


class Theirs:
    """An object whose own code fails on one rank."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict:
        if self.fails:
            raise ValueError("their own code")
        return {"a": 1}

    def load_state_dict(self, state: dict) -> None:
        raise AssertionError(state)


def outcome(call) -> list:
    """Return [class, message, problems, seconds] of what a call came to."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the answer
        problems = list(getattr(error, "problems", ()))
        return [type(error).__name__, str(error), problems, time.monotonic() - began]
    return ["", "", [], time.monotonic() - began]


def disagree(folder: str) -> dict[str, list]:
    """Save and load what the ranks do not agree on."""
    rank = dist.get_rank()
    store = vc.open_store(Path(folder) / "store")
    ckpt = vc.Checkpointer(store, "run", options=vc.SaveOptions(deadline_seconds=120.0))
    mesh = init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(torch.arange(24.0).reshape(8, 3), mesh, [Shard(0)])
    good = {"w": sharded, "b": torch.ones(3), "lr": 0.5}
    ckpt.save(0, good)

    def save(state, step=1, **more):
        return outcome(lambda: ckpt.save(step, state, **more).result())

    last = rank == 3
    found = {
        "a key more": save(good | ({"sidecar": torch.ones(1)} if rank == 0 else {})),
        "a key less": save({k: v for k, v in good.items() if not (last and k == "b")}),
        "dtype": save(good | {"b": torch.ones(3, dtype=torch.float64 if last else torch.float32)}),
        "shape": save(good | {"b": torch.ones(4 if last else 3)}),
        "value": save(good | {"lr": 0.25 if last else 0.5}),
        "step": save(good, step=5 + last),
        "base": save(good, base="run@0" if last else None),
        "copies": save({"weight": torch.tensor([2 * rank, 2 * rank + 1])}),
        "their code": save(good | {"o": Theirs(last)}),
        "no memory": save(good | {"b": torch.ones(3, device="meta" if last else "cpu")}),
        "other order": save({k: good[k] for k in (sorted(good) if last else reversed(good))}, step=7),
    }

    def load(state, **more):
        return outcome(lambda: ckpt.load(state, step=0, **more))

    target = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)]), "b": torch.zeros(3), "lr": 0.0}
    found |= {
        "load shape": load(target | {"b": torch.zeros(4 if last else 3)}),
        "load missing": load(target | ({"more": torch.zeros(1)} if last else {})),
        "load unexpected": load({k: v for k, v in target.items() if k != "b"}),
        "load nothing there": outcome(lambda: ckpt.load(target, step=99)),
        "load their code": load(target | {"lr": Theirs(last)}, ignore=("nothing",)),
    }
    untouched = not target["w"].to_local().any() and not target["b"].any() and target["lr"] == 0.0
    found["untouched"] = [untouched]
    found["load"] = load(target)
    found["loaded"] = [torch.equal(target["w"].full_tensor(), torch.arange(24.0).reshape(8, 3)), target["lr"]]
    found["steps"] = [info.step for info in store.snapshots("run")]
    ckpt.close()
    return found


def regroup(folder: str) -> dict[str, list]:
    """Save on some ranks and load on others, over groups of which the ranks are in different numbers."""
    rank = dist.get_rank()
    store = vc.open_store(Path(folder) / "store")
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    odd = dist.new_group([1, 3])
    found: dict[str, list] = {}
    began = time.monotonic()
    for size, group in groups.items():
        if rank < size:
            with vc.Checkpointer(store, f"of {size}", process_group=group) as ckpt:
                ckpt.save(1, {"rng": vc.PerRank({"seed": 10 * rank}), "w": torch.arange(5)})
    if rank in {1, 3}:
        with vc.Checkpointer(store, "odd", process_group=odd) as ckpt:
            ckpt.save(1, {"rng": vc.PerRank(rank)})
    found["saved"] = [time.monotonic() - began]
    dist.barrier()
    found |= load_regrouped(store, groups[2])
    outsider = vc.Checkpointer(store, "x", process_group=groups[1])
    found["not a member"] = outcome(lambda: outsider.save(1, {})) if rank else []
    found["odd"] = [store["odd@1"].state_dict()["rng"]]
    found["files"] = saved_again_and_again(folder)
    mine = Path(folder) / ("short" if rank < 2 else "a folder that only some ranks have")
    found["a store on some"] = outcome(lambda: vc.load(mine, {"w": torch.zeros(3)}))
    return found


def load_regrouped(store: vc.Store, pair: dist.ProcessGroup) -> dict[str, list]:
    """Load what two ranks saved on these two and on all."""
    found: dict[str, list] = {}
    if dist.get_rank() < 2:
        with vc.Checkpointer(store, "of 2", process_group=pair) as ckpt:
            state = {"rng": vc.PerRank({"seed": 0}), "w": torch.zeros(5, dtype=torch.int64)}
            ckpt.load(state)
            found["of 2 on 2"] = [state["rng"].value["seed"], state["w"].tolist()]
    with vc.Checkpointer(store, "of 2") as ckpt:
        state = {"rng": vc.PerRank({"seed": 77}), "w": torch.zeros(5, dtype=torch.int64)}
        found["of 2 on 4"] = outcome(lambda: ckpt.load(state))
        found["untouched"] = [state["rng"].value["seed"], state["w"].tolist()]
        ckpt.load(state, ignore=("rng",))
        found["ignored"] = [state["rng"].value["seed"], state["w"].tolist()]
    return found


def saved_again_and_again(folder: str) -> list[int]:
    """Return how many files were open before many short saves, and how many after."""
    files = Path("/proc/self/fd")
    before = len(list(files.iterdir()))
    for step in range(8):
        vc.save(Path(folder) / "short", {"w": torch.full((3,), step)})
    return [before, len(list(files.iterdir()))]
