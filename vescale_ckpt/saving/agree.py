"""Agreement: the collectives of a save, in which ranks settle its transaction and its plan.

One fixed-size collective when every rank has the plan cached; otherwise what the ranks hold is exchanged and each of
them makes the same plan from it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.format.tree_codec import decode_tree, encode_tree
from vescale_ckpt.plan.holdings import Holdings, LeafSpec, decode_boxes, decode_table
from vescale_ckpt.plan.rows import gather_rows
from vescale_ckpt.plan.save_plan import SavePlan, make_save_plan, merge_tables
from vescale_ckpt.state.dtypes import dtype_name, item_bytes
from vescale_ckpt.state.merge import merge_trees
from vescale_ckpt.state.tree import ValueNode
from vescale_storage.digest import digest, digest_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    from vescale_ckpt.adapters.capture import Captured
    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.state.leaf import TensorLeaf
    from vescale_ckpt.state.merge import PerRankEntries
    from vescale_ckpt.state.tree import Node

_RECORD = struct.Struct("<16s32s?32sq32sq?")
"""transaction, plan key, plan is cached here, digest of tree, step, digest of run and bases, step of a failed save,
this rank could not prepare."""

NO_STEP = -1


@dataclass(frozen=True, slots=True)
class Agreement:
    """What the ranks settled for one save."""

    transaction: str
    """32 hex digits, the coordinator's choice."""
    plan: SavePlan
    plan_key: bytes
    """The same on all ranks that follow the same plan."""
    tree_differs: bool
    """This rank's tree is not the coordinator's, so it must send it."""


@dataclass(frozen=True, slots=True)
class Intent:
    """What a rank is about to save."""

    run: str
    step: int
    bases: tuple[str, ...]
    """Snapshots to deduplicate against."""
    failed_step: int
    """The step of an earlier background save whose failure this rank has not seen, or ``NO_STEP``; ranks may differ."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What this rank has to save."""

    captured: Captured
    tree: Node
    """Per-rank values taken out."""
    per_rank: PerRankEntries


class PlanCache:
    """The last plan, under a key of everything that it depends on."""

    def __init__(self) -> None:
        self.key = b""
        """Of what this rank holds."""
        self.plan: SavePlan | None = None
        self.plan_key = b""
        """Of what all ranks hold; the same on all of them."""
        self.differ = False
        """Trees differ between ranks and could be merged when last looked at (stages of a pipeline)."""


def agree(
    group: Group,
    prepared: Prepared | Exception,
    cache: PlanCache,
    *,
    intent: Intent,
    on_failed: Callable[[frozenset[int]], NoReturn],
) -> Agreement:
    """Settle one save with all ranks; a collective.

    Args:
        group: the ranks.
        prepared: what this rank has to save, or why it cannot: then all ranks raise.
        cache: the last plan; replaced where a new one is made.
        intent: what this rank is about to save; must be the same on all ranks.
        on_failed: called on all ranks, to raise, where any rank brings such a step.

    Raises:
        MismatchError: the ranks are not saving the same thing, or disagree on the state; lists all.
    """
    error = prepared if isinstance(prepared, Exception) else None
    leaves = [] if isinstance(prepared, Exception) else prepared.captured.leaves
    tree = ValueNode(None) if isinstance(prepared, Exception) else prepared.tree
    holdings = Holdings.of([(_spec(leaf), [piece.box for piece in leaf.pieces]) for leaf in leaves])
    key = digest(holdings.key() + group.world_size.to_bytes(4, "little"))
    tree_bytes = encode_tree(tree)
    what = digest("\0".join([intent.run, *intent.bases]).encode())
    mine = _RECORD.pack(
        os.urandom(16),
        key,
        cache.key == key,
        digest(tree_bytes),
        intent.step,
        what,
        intent.failed_step,
        error is not None,
    )
    records = [_RECORD.unpack(data) for data in group.all_gather_fixed(mine)]
    if any(record[7] for record in records):
        group.agree(error, f"preparing the save of {intent.run}@{intent.step}")
    if failed := frozenset(record[6] for record in records) - {NO_STEP}:
        on_failed(failed)
    if len({record[4] for record in records}) > 1:
        steps = ", ".join(f"{record[4]} on rank {r}" for r, record in enumerate(records))
        raise MismatchError(f"cannot save {intent.run}: the ranks called save with different steps: {steps}")
    if len({record[5] for record in records}) > 1:
        raise MismatchError(f"cannot save {intent.run}@{intent.step}: the ranks name different runs or bases")
    tree_differs = records[group.rank][3] != records[0][3]
    trees = [record[3] for record in records]
    if cache.plan is None or not all(record[2] for record in records) or (len(set(trees)) > 1 and not cache.differ):
        _check_trees(group, tree, tree_bytes, trees)
        cache.differ = len(set(trees)) > 1
        cache.plan, cache.plan_key = _exchange(group, holdings)
        cache.key = key
    return Agreement(records[0][0].hex(), cache.plan, cache.plan_key, tree_differs)


def _check_trees(group: Group, tree: Node, tree_bytes: bytes, digests: Sequence[bytes]) -> None:
    """Refuse trees that cannot be merged, on all ranks, before anything is written."""
    if len(set(digests)) == 1:
        return
    first = digests.index(digests[group.rank]) == group.rank
    sent = group.all_gather(tree_bytes if first else b"")
    by_digest = {digests[r]: decode_tree(data) for r, data in enumerate(sent) if data}
    by_digest[digests[group.rank]] = tree
    merge_trees([(r, by_digest[name]) for r, name in enumerate(digests)])


def _exchange(group: Group, holdings: Holdings) -> tuple[SavePlan, bytes]:
    """Tell all ranks what this one holds; return the plan that they all make, and its key."""
    table = holdings.table_bytes()
    names = group.all_gather_fixed(digest(table))
    first = names.index(names[group.rank]) == group.rank
    tables = group.all_gather(table if first else b"")
    boxes = group.all_gather(holdings.box_bytes())
    return plan_of(names, tables, boxes, rank=group.rank), digest_parts([*names, *map(digest, boxes)])


def plan_of(names: Sequence[bytes], tables: Sequence[bytes], boxes: Sequence[bytes], *, rank: int) -> SavePlan:
    """Return the plan that every rank makes from what all ranks sent.

    Args:
        names: per rank, the digest of its table.
        tables: per rank, its table where it is the first with that digest, else nothing.
        boxes: per rank, its columns of boxes.
        rank: whose regions to keep.
    """
    by_name = {names[r]: decode_table(data) for r, data in enumerate(tables) if data}
    ranks_of: dict[bytes, list[int]] = {}
    for r, name in enumerate(names):
        ranks_of.setdefault(name, []).append(r)
    specs = merge_tables([(ranks, by_name[name]) for name, ranks in ranks_of.items()])
    index = {spec.path: i for i, spec in enumerate(specs)}
    place = {name: np.array([index[s.path] for s in by_name[name]], dtype=np.int64) for name in by_name}
    columns = [(r, place[name], *decode_boxes(boxes[r], len(by_name[name]))) for r, name in enumerate(names)]
    rows = gather_rows(columns, np.array([len(spec.shape) for spec in specs], dtype=np.int64))
    return make_save_plan(specs, rows, rank=rank, world_size=len(names))


def _spec(leaf: TensorLeaf) -> LeafSpec:
    name = dtype_name(leaf.dtype)
    return LeafSpec(
        path=leaf.path,
        dtype=name,
        item_bytes=item_bytes(name),
        shape=leaf.global_shape,
        kind=str(leaf.kind),
        holding=str(leaf.holding),
        alias_of=leaf.alias_of,
        abstains=leaf.alias_of is None and all(piece.box.volume == 0 for piece in leaf.pieces),
    )
