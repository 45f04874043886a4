"""Worlds of ranks as loops over the pure floors: what each holds, plans, writes and reads, without any group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vescale_ckpt.execute.commit import fragment_of
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.execute.write import WriteOptions, Writer, Written
from vescale_ckpt.format.assemble import assemble, check_agreement
from vescale_ckpt.format.fragment import Fragment, FragmentChunks, decode_fragment, encode_fragment
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import Manifest, PackRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.plan.holdings import Holdings, LeafSpec
from vescale_ckpt.plan.load_plan import Want, chunks_needed, prove_cover
from vescale_ckpt.plan.parts import chunks_of, parts_of
from vescale_ckpt.plan.read_share import share_reads
from vescale_ckpt.plan.rows import gather_rows
from vescale_ckpt.plan.save_plan import SavePlan, make_save_plan, merge_tables
from vescale_ckpt.saving.agree import plan_of
from vescale_ckpt.stage.memory import BufferPool
from vescale_ckpt.stage.stager import Stager
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.leaf import Piece, TensorLeaf
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vescale_ckpt.plan.load_plan import ChunkNeed
    from vescale_storage.backend import Backend


@dataclass
class Spread:
    """One tensor and which boxes of it each rank holds."""

    name: str
    shape: tuple[int, ...]
    boxes: list[list[Box]]
    """By rank."""
    dtype: torch.dtype = torch.float32
    holding: str = "sharded"
    full: torch.Tensor | None = None
    alias_of: str | None = None

    @property
    def spec(self) -> LeafSpec:
        alias = None if self.alias_of is None else (self.alias_of,)
        return LeafSpec(
            (self.name,), dtype_name(self.dtype), self.dtype.itemsize, self.shape, "tensor", self.holding, alias
        )


def laid_out(name: str, shape: tuple[int, ...], layout: Layout, **more) -> Spread:
    """Return a tensor as a layout holds it; rank r is the r-th coordinate in row-major order."""
    coordinates = list(np.ndindex(*layout.mesh_shape))
    return Spread(name, shape, [[span.box for span in spans(layout, shape, at)] for at in coordinates], **more)


def replicated(name: str, shape: tuple[int, ...], world_size: int, **more) -> Spread:
    """Return a tensor that every rank holds whole."""
    return Spread(name, shape, [[Box.whole(shape)] for _ in range(world_size)], holding="replicated", **more)


def holdings(state: Sequence[Spread], rank: int) -> Holdings:
    """Return what a rank holds."""
    return Holdings.of([(t.spec, t.boxes[rank] if t.alias_of is None else []) for t in state])


def plans(state: Sequence[Spread], world_size: int, ranks: Sequence[int] | None = None) -> list[SavePlan]:
    """Return each rank's plan, as it comes out of what the ranks send one another."""
    sent = [holdings(state, rank) for rank in range(world_size)]
    tables = [h.table_bytes() for h in sent]
    names = [digest(table) for table in tables]
    first = [
        table if names.index(name) == rank else b""
        for rank, (table, name) in enumerate(zip(tables, names, strict=True))
    ]
    boxes = [h.box_bytes() for h in sent]
    return [plan_of(names, first, boxes, rank=rank) for rank in (range(world_size) if ranks is None else ranks)]


def quick_plans(state: Sequence[Spread], world_size: int, ranks: Sequence[int]) -> list[SavePlan]:
    """Return plans of some ranks of a large world, gathering what all hold once."""
    specs = merge_tables([(range(world_size), [t.spec for t in state])])
    column = np.arange(len(state))
    columns = [(r, column, h.counts, h.values) for r in range(world_size) for h in [holdings(state, r)]]
    rows = gather_rows(columns, np.array([len(t.shape) for t in state]))
    return [make_save_plan(specs, rows, rank=rank, world_size=world_size) for rank in ranks]


def leaf_of(tensor: Spread, rank: int) -> TensorLeaf:
    """Return a rank's leaf with copies of its boxes as memory."""
    pieces = tuple(
        Piece(box, tensor.full[box.slices].clone() if box.shape else tensor.full.clone())
        for box in (tensor.boxes[rank] if tensor.alias_of is None else [])
        if box.volume
    )
    return TensorLeaf((tensor.name,), tensor.dtype, tensor.shape, pieces)


def planned(state: Sequence[Spread], every: Sequence[SavePlan], *, step: int = 1) -> Manifest:
    """Return the manifest of what plans say, without a byte: digests tell the boxes, and nothing is stored."""
    widths = [t.dtype.itemsize for t in state]
    fragments = []
    for rank, plan in enumerate(every):
        columns: dict[str, list] = {
            name: [] for name in ("tensor", "tile", "digest", "pack", "offset", "length", "codec")
        }
        partial, offset = [], 0
        for part in parts_of(plan.regions, plan.tensors, widths, 1 << 30):
            for chunk in chunks_of(part, plan.tensors[part.tensor]):
                if not chunk.whole_tile:
                    partial.append((len(columns["tile"]), chunk.box))
                size = chunk.box.volume * widths[chunk.tensor]
                name = digest(f"{chunk.tensor} {chunk.box}".encode())
                row = (chunk.tensor, chunk.tile, name, 0, offset, size, 0)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
                offset += size
        packs = (PackRecord(digest(str(rank).encode()).hex(), offset + 100),) if offset else ()
        chunks = FragmentChunks.of(**columns, partial=partial)
        fragments.append(Fragment(rank=rank, plan_key=b"", chunks=chunks, packs=packs))
    tensors = every[0].tensors
    table, packs = assemble(fragments, tensors)
    tree = DictNode(tuple((t.name, TensorNode()) for t in state))
    return Manifest("run", step, 0.0, "0" * 32, len(every), tree, tensors, table, packs)


@dataclass
class Saved:
    """What a simulated save came to."""

    manifest: Manifest
    written: list[Written]
    plans: list[SavePlan]


def save(
    backend: Backend,
    state: Sequence[Spread],
    world_size: int,
    *,
    step: int = 1,
    bases: Sequence[Manifest] = (),
    options: WriteOptions | None = None,
    slab_bytes: int = 1 << 20,
    block_bytes: int = 1 << 20,
) -> Saved:
    """Stage and write every rank's share, one rank after another, and return the manifest that would be committed."""
    every = plans(state, world_size)
    written, fragments = [], []
    for rank, plan in enumerate(every):
        leaves = [leaf_of(t, rank) for t in state]
        by_path = {leaf.path: leaf for leaf in leaves}
        parts: list = []
        widths = [t.dtype.itemsize for t in state]
        Stager(BufferPool(slab_bytes, None), 5.0).stage(
            parts_of(plan.regions, plan.tensors, widths, slab_bytes),
            [by_path[record.path] for record in plan.tensors],
            parts.append,
            in_place=rank % 2 == 0,
        )
        writer = Writer(
            backend,
            plan.tensors,
            DedupIndex(bases),
            BufferPool(block_bytes, 6),
            options or WriteOptions(pack_bytes=1 << 20),
        )
        written.append(writer.write(parts))
        fragment = fragment_of(rank, b"plan", written[-1], None, ())
        fragments.append(decode_fragment(encode_fragment(fragment)))
    tensors = every[0].tensors
    check_agreement(fragments, tensors, world_size)
    chunks, packs = assemble(fragments, tensors)
    tree = DictNode(tuple((t.name, TensorNode()) for t in state))
    manifest = Manifest("run", step, 0.0, "0" * 32, world_size, tree, tensors, chunks, packs)
    for tensor, record in enumerate(manifest.tensors):
        if record.alias_of is None:
            prove_cover(manifest, tensor)
    return Saved(decode_manifest(encode_manifest(manifest)), written, every)


@dataclass
class Loaded:
    """What a simulated load came to."""

    pieces: list[list[Piece]]
    """By rank: the memory that was filled, in the order of the tensors and their boxes."""
    bytes_read: list[int]
    """By rank."""
    rows_read: list[list[int]]
    """By rank."""
    rows_needed: list[list[int]]
    """By rank."""


def load(
    backend: Backend,
    manifest: Manifest,
    state: Sequence[Spread],
    world_size: int,
    *,
    round_bytes: int = 1 << 20,
    options: ReadOptions | None = None,
) -> Loaded:
    """Read every row on the rank that the plan says, then fill what every rank of another world holds."""
    pieces: list[list[Piece]] = []
    needs: list[dict[int, ChunkNeed]] = []
    for rank in range(world_size):
        mine = [
            (manifest.by_path[t.name,], Piece(box, torch.full(box.shape, 99, dtype=torch.uint8).to(t.dtype)))
            for t in state
            for box in t.boxes[rank]
            if box.volume
        ]
        pieces.append([piece for _, piece in mine])
        found = chunks_needed(manifest, [Want(index, piece.box) for index, piece in mine])
        needs.append({need.row: need for need in found})
    needed = [np.array(list(rows), dtype=np.int64) for rows in needs]
    raw_of: dict[int, torch.Tensor] = {}
    rows_read, bytes_read = [], []
    for rank in range(world_size):
        share = share_reads(manifest, needed, rank=rank, round_bytes=round_bytes)
        shared = [int(row) for turn in share.rounds for row in turn.rows[turn.reader == rank]]
        rows_read.append([*share.own.tolist(), *shared])
        reader = Reader(backend, manifest, options or ReadOptions())

        def keep(need: ChunkNeed, raw: torch.Tensor) -> None:
            assert need.row not in raw_of, f"row {need.row} is read twice"
            raw_of[need.row] = raw.clone()

        reader.read([needs[rank][row] for row in rows_read[-1]], keep)
        bytes_read.append(reader.counters.bytes_read)
    for rank in range(world_size):
        filler = Filler(manifest, pieces[rank])
        for row, need in needs[rank].items():
            filler.deliver(need, raw_of[row])
    return Loaded(pieces, bytes_read, rows_read, [list(rows) for rows in needs])
