"""How much does a plan cost, from what all ranks hold to what one of them writes?"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from benchmarks.case import DCP, OURS, Case, Question, Ratio, against
from benchmarks.measure import measure
from benchmarks.peers import quiet
from vescale_ckpt.adapters.capture import capture
from vescale_ckpt.coordinate.group import Group
from vescale_ckpt.plan.holdings import Holdings, LeafSpec
from vescale_ckpt.saving.agree import NO_STEP, Intent, PlanCache, Prepared, agree, plan_of
from vescale_ckpt.state.merge import split_per_rank
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample

_MODES = ("rows", "grid", "hybrid", "copies")
_RANK = 5
"""Whose plan is made."""
_DCP_ITEMS = 40_000
"""The largest plan that DCP is asked for, in ranks times tensors: its cost is linear, and a million take minutes."""
_UNIT = "seconds allowed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planning(Case):
    """A plan for some ranks and tensors."""

    mode: str
    """``rows``: cut by rows over all ranks; ``grid``: by rows and 8 columns; ``hybrid``: 2 copies of rows; ``copies``;
    ``cached``: the second save of a plan that did not change."""
    num_ranks: int
    num_tensors: int


def cases(scale: Scale) -> Sequence[Planning]:
    ranks, tensors = scale.plan_ranks, scale.plan_tensors
    goal = (Ratio(name="CPU seconds a plan", of=(OURS, "cpu_seconds"), to=(_UNIT, "seconds"), at_most=1.0),)
    found = [
        Planning(
            name=f"{mode}, {ranks} x {tensors}",
            mode=mode,
            num_ranks=ranks,
            num_tensors=tensors,
            repeats=3,
            ratios=goal if mode == "rows" or scale.name != "tiny" else (),
        )
        for mode in _MODES
    ]
    few, most = 64, scale.most_ranks
    beside_dcp = (against("CPU / DCP", "cpu_seconds", DCP),)
    steps = sorted({max(2, most // 4**i) for i in range(4)} | {8})
    found += [
        Planning(
            name=f"over ranks: {n} x {few}",
            mode="rows",
            num_ranks=n,
            num_tensors=few,
            sweep=("ranks", n),
            curve=f"{few} tensors",
            repeats=3,
            ratios=beside_dcp if n * few <= _DCP_ITEMS else (),
        )
        for n in steps
    ]
    found += [
        Planning(
            name=f"over tensors: {few} x {n}",
            mode="hybrid",
            num_ranks=few,
            num_tensors=n,
            sweep=("tensors", n),
            curve=f"{few} ranks",
            repeats=3,
        )
        for n in sorted({max(4, 16 * tensors // 4**i) for i in range(4)})
    ]
    if most > ranks:
        found.append(
            Planning(name=f"rows, {most} x {tensors}", mode="rows", num_ranks=most, num_tensors=tensors, repeats=1)
        )
    found.append(
        Planning(
            name=f"second save, {ranks} x {tensors}",
            mode="cached",
            num_ranks=ranks,
            num_tensors=tensors,
            repeats=3,
            ratios=(
                Ratio(
                    name="collectives of a second save",
                    of=(OURS, "collectives"),
                    to=(_UNIT, "seconds"),
                    at_most=1.0,
                    exact=True,
                ),
            ),
        )
    )
    return tuple(found)


def run(case: Planning, bench: Bench) -> None:
    if case.mode == "cached":
        _second_save(case, bench)
    else:
        _plan(case, bench)
    with measure() as taken:
        taken.counters["seconds"] = 1.0
    bench.add(_UNIT, taken.sample)


def _plan(case: Planning, bench: Bench) -> None:
    table, boxes = _holdings(case)
    names = [digest(table)] * case.num_ranks
    tables = [table] + [b""] * (case.num_ranks - 1)

    def ours(turn: int) -> Sample:
        del turn
        with measure() as taken:
            plan = plan_of(names, tables, boxes, rank=_RANK)
        loads = plan.bytes_by_rank
        taken.counters |= {
            "bytes_from_each_rank": len(boxes[0]),
            "regions": len(plan.regions),
            "imbalance": float(loads.max() / loads.mean()),
        }
        return taken.sample

    sides = {OURS: ours}
    if case.sweep is not None and case.sweep[0] == "ranks" and case.num_ranks * case.num_tensors <= _DCP_ITEMS:
        plans = _dcp_plans(case)

        def dcp(turn: int) -> Sample:
            del turn
            planner = DefaultSavePlanner()
            planner.set_up_planner({}, is_coordinator=True)
            with quiet(), measure() as taken:
                planner.create_global_plan(plans)
            return taken.sample

        sides[DCP] = dcp
    bench.compare(sides)


def _shape(tensor: int) -> tuple[int, int]:
    return (4096 + tensor % 7, 4096)


def _holdings(case: Planning) -> tuple[bytes, list[bytes]]:
    """Return the table that all ranks have in common, and each rank's columns of boxes."""
    holding = "replicated" if case.mode == "copies" else "sharded"
    specs = [
        LeafSpec(("model", f"layers.{t}.weight"), "float32", 4, _shape(t), "tensor", holding)
        for t in range(case.num_tensors)
    ]
    rows = np.array([_shape(t)[0] for t in range(case.num_tensors)])
    columns = _shape(0)[1]
    shards, cuts = {
        "rows": (case.num_ranks, 1),
        "grid": (max(1, case.num_ranks // 8), 8),
        "hybrid": (max(1, case.num_ranks // 2), 1),
        "copies": (1, 1),
    }[case.mode]
    step = -(-rows // shards)
    counts = np.ones(case.num_tensors, dtype=np.int64)
    boxes = []
    for rank in range(case.num_ranks):
        row, column = divmod(rank % (shards * cuts), cuts)
        low = np.minimum(row * step, rows)
        values = np.empty((case.num_tensors, 4), dtype=np.int64)
        values[:, 0], values[:, 1] = low, column * (columns // cuts)
        values[:, 2], values[:, 3] = np.minimum(step, rows - low), columns // cuts
        boxes.append(Holdings(tuple(specs) if rank == 0 else (), counts, values.reshape(-1)).box_bytes())
    return Holdings(tuple(specs), counts, np.empty(0, dtype=np.int64)).table_bytes(), boxes


def _dcp_plans(case: Planning) -> list[SavePlan]:
    """Return what every rank would send of the same tensors cut by rows."""
    properties = TensorProperties(dtype=torch.float32)
    plans = []
    for rank in range(case.num_ranks):
        items = []
        for tensor in range(case.num_tensors):
            rows, columns = _shape(tensor)
            step = -(-rows // case.num_ranks)
            low = min(rank * step, rows)
            offset, size = torch.Size((low, 0)), torch.Size((min(step, rows - low), columns))
            data = TensorWriteData(ChunkStorageMetadata(offset, size), properties, torch.Size((rows, columns)))
            index = MetadataIndex(f"model.layers.{tensor}.weight", offset)
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items, planner_data={}))
    return plans


class _Echo(Group):
    """A rank of a world whose ranks all send what this one sends; counts collectives and bytes."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.num_collectives = 0
        self.num_bytes = 0

    def all_gather_fixed(self, data: bytes) -> list[bytes]:
        """Return the data of this rank as that of every rank."""
        self.num_collectives += 1
        self.num_bytes += len(data)
        return [data] * self.world_size

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming_bytes: Sequence[int]) -> list[torch.Tensor]:
        """Refuse: no plan exchanges tensors."""
        raise NotImplementedError

    def _broadcast(self, data: bytes, length: int, root: int) -> bytes:
        raise NotImplementedError


def _second_save(case: Planning, bench: Bench) -> None:
    """Measure all that the caller's thread does before staging, once the plan is known: capture and agreement."""
    state: Any = {"model": {f"layers.{t}.weight": torch.empty(64, 64) for t in range(case.num_tensors)}}
    group, cache = _Echo(case.num_ranks), PlanCache()
    steps = itertools.count()

    def refuse(steps: frozenset[int]) -> NoReturn:
        raise RuntimeError(f"saves that never were have failed: {steps}")

    def once(turn: int) -> Sample:
        del turn
        collectives, sent = group.num_collectives, group.num_bytes
        with measure() as taken:
            captured = capture(state, rank=0)
            prepared = Prepared(captured, *split_per_rank(captured.tree))
            agree(group, prepared, cache, intent=Intent("run", next(steps), (), NO_STEP), on_failed=refuse)
        taken.counters |= {
            "collectives": group.num_collectives - collectives,
            "bytes_sent": group.num_bytes - sent,
        }
        return taken.sample

    bench.compare({OURS: once})


QUESTION = Question(
    name="planning",
    title="Planning",
    text=(
        "In one process, without any network: from what ranks send one another to the plan of one rank, which every "
        "rank makes for itself. Proves on the way that every element is held, and balances copies by bytes. DCP's "
        "coordinator merges plans of items, for all ranks at once (asked up to 40,000 items). The last row is a second "
        "save of the same state: what the caller's thread does before it copies."
    ),
    cases=cases,
    run=run,
    columns=("bytes_from_each_rank", "imbalance", "collectives", "bytes_sent"),
)
