"""What the ranks of real worlds do for the cases: save in one world, load in new processes with another seed."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import vescale_ckpt as vc
from tests.cases.inputs import blank_at, coordinate_of, local_of, same_bits, tagged, view_at
from vescale_ckpt.errors import MismatchError, RankFailureError
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout
from vescale_ckpt.layout.placement import Boxes, Flat, Interleaved, Ragged, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from collections.abc import Sequence

TENSORS = {
    "matrix": tagged(24, 10),
    "odd": tagged(13, 7, 3),
    "line": tagged(17, dtype=torch.float64),
    "large": tagged(1030, 770),
    "half": tagged(64, 48, dtype=torch.bfloat16),
    "row": tagged(1, 17),
    "scalar": tagged(),
}


def layouts_of(name: str, num_ranks: int) -> list[Layout]:
    """Return layouts of all kinds for one tensor on so many ranks; the meshes may be smaller than the world."""
    shape = tuple(TENSORS[name].shape)
    numel = math.prod(shape)
    per_rank = -(-numel // num_ranks // 16) * 16 + 16
    found = [
        Layout((num_ranks,), (Replicate(),)),
        Layout((num_ranks,), (Flat.in_bucket(5, numel, per_rank, num_ranks),)),
    ]
    if not shape:
        return found
    rows = shape[0]
    pair = (2, num_ranks // 2) if num_ranks % 2 == 0 else (1, num_ranks)
    cuts = [r * rows // num_ranks for r in range(num_ranks + 1)]
    boxes = tuple(Box((a, *(0,) * (len(shape) - 1)), (b - a, *shape[1:])) for a, b in itertools.pairwise(cuts))
    thirds = (rows // 3, rows // 3, rows - 2 * (rows // 3))
    found += [
        Layout((num_ranks,), (Shard(-1),)),
        Layout((num_ranks,), (Boxes(boxes),)),
        Layout((num_ranks,), (Interleaved(0, thirds),)),
        Layout(pair, (Replicate(), Shard(0))),
        Layout(pair, (Shard(0), Shard(0)), order=(1, 0)),
        Layout(pair, (StridedShard(0, pair[1]), Shard(0))),
        Layout(pair, (Shard(0), Interleaved(0, thirds)), order=(1, 0)),
        Layout((num_ranks,), (Ragged((0,), tuple(b - a for a, b in itertools.pairwise(cuts))),)),
    ]
    if len(shape) > 1:
        found.append(Layout(pair, (Shard(1), Shard(0))))
    return found


NUM_RANDOM = 24


def random_tensor(seed: int) -> torch.Tensor:
    """Return a tensor of 0 to 4 dims of 0 to 17 elements, the same on all ranks of all worlds."""
    chance = random.Random(seed)
    shape = [chance.randint(0, 17) if chance.random() < 0.2 else chance.randint(1, 17) for _ in range(seed % 5)]
    while math.prod(shape) > 4096:
        shape.pop()
    return tagged(*shape, dtype=chance.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8)))


def random_layout(chance: random.Random, shape: tuple[int, ...], num_ranks: int) -> Layout:
    """Return any layout of a tensor on so many ranks."""
    numel = math.prod(shape)
    if not shape or chance.random() < 0.2:
        per_rank = -(-numel // num_ranks // 4) * 4 + 4
        return Layout((num_ranks,), (Flat.in_bucket(chance.randint(0, 3), numel, per_rank, num_ranks),))
    mesh = chance.choice([(num_ranks,), (1, num_ranks), (2, num_ranks // 2) if num_ranks % 2 == 0 else (num_ranks, 1)])
    choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    order = chance.sample(range(len(mesh)), len(mesh)) if chance.random() < 0.5 else None
    return Layout(mesh, tuple(chance.choice(choices) for _ in mesh), None if order is None else tuple(order))


def save_random(folder: str) -> None:
    """Save tensors of random shapes, each on a random layout."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    state = {}
    for seed in range(NUM_RANDOM):
        full = random_tensor(seed)
        layout = random_layout(random.Random(1000 + seed), tuple(full.shape), num_ranks)
        state[str(seed)] = view_at(full, layout, coordinate_of(layout, rank))
    with _checkpointer(folder, "random") as ckpt:
        ckpt.save(0, state)


def load_random(store: vc.Store) -> None:
    """Load them onto other random layouts of this world, three times."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with vc.Checkpointer(store, "random") as ckpt:
        for turn in range(3):
            state, right = {}, {}
            for seed in range(NUM_RANDOM):
                full = random_tensor(seed)
                layout = random_layout(random.Random(f"{num_ranks} {turn} {seed}"), tuple(full.shape), num_ranks)
                local, state[str(seed)] = blank_at(full, layout, coordinate_of(layout, rank))
                right[str(seed)] = (local, local_of(full, layout, coordinate_of(layout, rank)), layout)
            ckpt.load(state)
            for name, (local, expected, layout) in right.items():
                assert same_bits(local, expected), (turn, name, layout)


def _checkpointer(folder: str, run: str, **options) -> vc.Checkpointer:
    return vc.Checkpointer(vc.open_store(Path(folder) / "store"), run, options=vc.SaveOptions(**options))


def _rank_state(seed: int, draws: int) -> dict:
    torch.manual_seed(seed)
    random.seed(seed)
    generator = np.random.default_rng(seed)
    for _ in range(draws):
        torch.rand(1)
        random.random()
        generator.random()
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": generator.bit_generator.state,
        "draws": draws,
    }


DRAWS = (1, 4, 7, 10)
SAMPLES = 23


def deal_anew(saved: Sequence[tuple[vc.RankPlace, dict]], here: vc.RankPlace) -> dict:
    """Share out among the data-parallel ranks of this world what those of another one had before them."""
    first = [value for place, value in saved if place.coordinate["tp"] == 0]
    samples = torch.cat([value["samples"] for value in first]).sort().values
    return {"epoch": first[0]["epoch"], "samples": samples[here.coordinate["dp"] :: here.mesh["dp"]]}


def save(folder: str) -> dict:
    """Save every layout of every tensor and every rank's random state; return what becomes of copies that differ."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    step = 0
    for name, full in TENSORS.items():
        with _checkpointer(folder, name) as ckpt:
            for layout in layouts_of(name, num_ranks):
                ckpt.save(step, {"t": view_at(full, layout, coordinate_of(layout, rank))})
                step += 1
    save_random(folder)
    _checkpointer(folder, "rng").save(0, {"rng": vc.PerRank(_rank_state(1000 + rank, DRAWS[rank % 4])), "step": 5})
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "tp"))
    dealt = torch.arange(SAMPLES)[mesh.get_local_rank("dp") :: 2]
    _checkpointer(folder, "loader").save(0, {"loader": vc.PerRank({"epoch": 3, "samples": dealt}, mesh=mesh)})
    return {"steps": step, "continued": _draw(), "differing": differing(folder)}


def _draw() -> list[float]:
    return [float(torch.rand(1)) for _ in range(3)] + [random.random() for _ in range(3)]


def differing(folder: str) -> dict:
    """Save one key with other values on every rank, with torch's DCP and here."""
    rank = dist.get_rank()
    mine = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    dcp.save({"weight": mine.clone()}, checkpoint_id=Path(folder) / "dcp")
    target = {"weight": torch.full((2,), -1.0)}
    dcp.load(target, checkpoint_id=Path(folder) / "dcp")
    try:
        _checkpointer(folder, "differing").save(0, {"weight": mine})
    except (MismatchError, RankFailureError) as error:
        return {"torch": target["weight"].tolist(), "here": str(error)}
    return {"torch": target["weight"].tolist(), "here": "saved"}


def load(folder: str, every: int) -> int:
    """Load every n-th saved snapshot of every tensor into a layout of this world; return how many loads were right."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77 + rank)
    store = vc.open_store(Path(folder) / "store")
    number = 0
    for name, full in TENSORS.items():
        targets = layouts_of(name, num_ranks)
        with vc.Checkpointer(store, name) as ckpt:
            for place, info in list(enumerate(store.snapshots(name)))[num_ranks % every :: every]:
                layout = targets[(place + num_ranks) % len(targets)]
                local, view = blank_at(full, layout, coordinate_of(layout, rank))
                report = ckpt.load({"t": view}, info.step)
                right = local_of(full, layout, coordinate_of(layout, rank))
                assert same_bits(local, right), (name, info.step, layout)
                assert report.bytes_needed == right.numel() * right.itemsize
                number += 1
    with vc.Checkpointer(store, "rng") as ckpt:
        assert num_ranks != 4
        try:
            ckpt.load({"rng": vc.PerRank(_rank_state(1, 0)), "step": 0})
        except MismatchError as error:
            refused = str(error)
        assert "per rank, of 4 ranks" in refused
        ckpt.load(state := {"rng": vc.PerRank(0), "step": 0}, ignore=["rng"])
        assert state["step"] == 5
    load_dealt(store)
    load_random(store)
    return number


def load_dealt(store: vc.Store) -> None:
    """Load what every rank had of a data set into another world: refused, or dealt anew by a function."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    with vc.Checkpointer(store, "loader") as ckpt:
        try:
            ckpt.load({"loader": vc.PerRank(None, mesh=mesh)})
        except MismatchError as error:
            refused = str(error)
        assert "4 ranks (dp 2 x tp 2)" in refused
        assert f"{num_ranks} ranks (dp {num_ranks})" in refused
        report = ckpt.load(state := {"loader": vc.PerRank(None, mesh=mesh, reshard=deal_anew)})
    assert any("deal_anew" in note for note in report.notes)
    mine = state["loader"].value
    assert mine["epoch"] == 3
    assert mine["samples"].tolist() == list(range(SAMPLES))[dist.get_rank() :: num_ranks]


def resume(folder: str) -> list[float]:
    """Load this rank's random state into a process with another seed, and go on drawing."""
    torch.manual_seed(4321)
    random.seed(99)
    state = {"rng": vc.PerRank(_rank_state(1, 0)), "step": 0}
    _checkpointer(folder, "rng").load(state)
    found = state["rng"].value
    torch.set_rng_state(found["torch"])
    version, internal, gauss = found["python"]
    random.setstate((version, tuple(internal), gauss))
    generator = np.random.default_rng(0)
    generator.bit_generator.state = found["numpy"]
    reference = np.random.default_rng(1000 + dist.get_rank())
    reference.random(found["draws"])
    assert generator.random() == reference.random()
    return _draw()


def _peak_growth(body) -> int:
    """Return by how many bytes the resident set grew at most while ``body`` ran."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    body()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def memory(folder: str, num_tensors: int, num_rows: int) -> dict:
    """Return this rank's share of a sharded state, and how much memory a save and a load of it took at most."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    columns = 1000
    rows = num_rows // num_ranks

    def state(fill: float | None) -> dict:
        made = {}
        for i in range(num_tensors):
            local = torch.rand(rows, columns) if fill is None else torch.full((rows, columns), fill)
            made[f"t{i}"] = vc.ShardedView((num_rows, columns), torch.float32, [((rank * rows, 0), local)])
        return made

    torch.manual_seed(rank)
    warm = _checkpointer(folder, "warm")
    warm.save(0, {"w": vc.ShardedView((num_ranks,), torch.float32, [((rank,), torch.ones(1))])})
    warm.load({"w": vc.ShardedView((num_ranks,), torch.float32, [((rank,), torch.ones(1))])})
    source, target = state(None), state(-1.0)
    found = {"share": num_tensors * rows * columns * 4}
    with _checkpointer(folder, "memory") as ckpt:
        found["save"] = _peak_growth(lambda: ckpt.save(0, source))
    with _checkpointer(folder, "memory") as ckpt:
        found["load"] = _peak_growth(lambda: ckpt.load(target))
    with _checkpointer(folder, "background") as ckpt:
        found["background"] = _peak_growth(lambda: ckpt.save(0, source, blocking=False).result())
    with _checkpointer(folder, "bounded", host_budget_bytes=32 << 20) as ckpt:
        found["bounded"] = _peak_growth(lambda: ckpt.save(0, source, blocking=False).result())
    for name, view in target.items():
        assert same_bits(view.pieces[0][1], source[name].pieces[0][1])
    return found


def budget(folder: str, num_saves: int) -> dict:
    """Return what memory a save of 64 MiB a rank takes within a budget, and what many saves in a row leave."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    rows = 4096

    def state(num_rows: int) -> dict:
        local = torch.rand(num_rows, 1024)
        view = vc.ShardedView((num_ranks * num_rows, 1024), torch.float32, [((rank * num_rows, 0), local)])
        return {"one": view, "copied": torch.arange(1000.0)}

    large = {f"t{i}": state(rows) for i in range(4)}
    warm = _checkpointer(folder, "warm", host_budget_bytes=32 << 20)
    warm.save(0, state(64), blocking=False).result()
    found: dict = {}
    with _checkpointer(folder, "large", host_budget_bytes=32 << 20) as ckpt:
        found["growth"] = _peak_growth(lambda: ckpt.save(0, large, blocking=False).result())
    found["share"] = 4 * rows * 1024 * 4
    small, resident = state(256), []
    with _checkpointer(folder, "small", host_budget_bytes=32 << 20) as ckpt:
        for step in range(num_saves):
            small["one"].pieces[0][1].add_(1)
            ckpt.save(step, small, blocking=step % 2 == 0)
            resident.append(_status("VmRSS"))
    third = num_saves // 3
    found["flat"] = max(resident[-third:]) - max(resident[third:-third])
    return found
