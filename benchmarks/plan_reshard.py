"""A reshard of a model of 405 billion parameters, planned without any data: 4,096 ranks to 4,096 others.

Run as a script it prints a table; ``--help`` says how to make it smaller. Everything that ranks do between "this is
what I hold" and "these bytes I write" or "these bytes I read" is done here, by the same functions, in one process.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape
from vescale_ckpt.layout.layout import Layout, spans
from vescale_ckpt.layout.placement import Replicate, Shard
from vescale_ckpt.plan.holdings import Holdings, LeafSpec
from vescale_ckpt.plan.load_plan import Want, chunks_needed, prove_covers
from vescale_ckpt.plan.read_share import NOBODY, share_reads
from vescale_ckpt.saving.agree import plan_of
from vescale_ckpt.state.dtypes import item_bytes
from vescale_ckpt.state.tree import DictNode, TensorNode
from vescale_storage.digest import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.plan.read_share import ReadShare
    from vescale_ckpt.plan.save_plan import SavePlan

    Int64s = npt.NDArray[np.int64]


ROUND_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a Llama; those of 405 billion parameters unless told otherwise."""

    num_layers: int = 126
    width: int = 16_384
    hidden: int = 53_248
    kv_width: int = 1_024
    vocab_size: int = 128_256

    def tensors(self) -> Iterator[tuple[str, int, tuple[int, ...], int | None]]:
        """Yield (name, layer, shape, dim that tensor parallelism cuts); ends are layers -1 and ``num_layers``."""
        w, h, k = self.width, self.hidden, self.kv_width
        yield "tok_embeddings.weight", -1, (self.vocab_size, w), 0
        per_layer: list[tuple[str, tuple[int, ...], int | None]] = [
            ("attention.wq", (w, w), 0),
            ("attention.wk", (k, w), 0),
            ("attention.wv", (k, w), 0),
            ("attention.wo", (w, w), 1),
            ("feed_forward.w1", (h, w), 0),
            ("feed_forward.w3", (h, w), 0),
            ("feed_forward.w2", (w, h), 1),
            ("attention_norm", (w,), None),
            ("ffn_norm", (w,), None),
        ]
        for layer in range(self.num_layers):
            for name, shape, dim in per_layer:
                yield f"layers.{layer}.{name}.weight", layer, shape, dim
        yield "norm.weight", self.num_layers, (w,), None
        yield "output.weight", self.num_layers, (self.vocab_size, w), 0


@dataclass(frozen=True, slots=True)
class World:
    """A mesh (pp, dp, tp) of ranks, row-major; dim 0 of what tensor parallelism leaves is cut over dp (FSDP2)."""

    tp: int
    pp: int
    dp: int

    @property
    def size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    def layout(self, tensor_parallel_dim: int | None) -> Layout:
        """Return how one stage's (dp, tp) holds a tensor."""
        cut = Replicate() if tensor_parallel_dim is None else Shard(tensor_parallel_dim)
        return Layout((self.dp, self.tp), (Shard(0), cut), order=(1, 0))

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the stage of a layer; stages are as even as can be, the ends stand with the first and the last."""
        return min(max(layer, 0) * self.pp // num_layers, self.pp - 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """What tensors have in common that are held alike."""

    shape: tuple[int, ...]
    dim: int | None
    dtype: str


@dataclass(frozen=True, slots=True)
class Tensors:
    """All tensors of a state."""

    specs: tuple[LeafSpec, ...]
    kinds: tuple[Kind, ...]
    layers: tuple[int, ...]
    num_layers: int

    @classmethod
    def of(cls, model: Model, *, moments: bool) -> Tensors:
        """Return the weights in bfloat16, and with ``moments`` Adam's in float32."""
        specs, kinds, layers = [], [], []
        states = [("model", "bfloat16", "")]
        if moments:
            states += [("optimizer", "float32", "/exp_avg"), ("optimizer", "float32", "/exp_avg_sq")]
        for top, dtype, suffix in states:
            for name, layer, shape, dim in model.tensors():
                path = (top, name + suffix)
                specs.append(LeafSpec(path, dtype, item_bytes(dtype), shape, "tensor", "sharded"))
                kinds.append(Kind(shape, dim, dtype))
                layers.append(layer)
        return cls(tuple(specs), tuple(kinds), tuple(layers), model.num_layers)

    @property
    def total_bytes(self) -> int:
        """Of one copy of everything."""
        return sum(math.prod(spec.shape) * spec.item_bytes for spec in self.specs)

    def of_stage(self, world: World, stage: int) -> list[int]:
        """Return the indexes of what a stage holds."""
        return [i for i, layer in enumerate(self.layers) if world.stage_of(layer, self.num_layers) == stage]


@dataclass(slots=True)
class Boxes:
    """Which boxes each place (d, t) of a stage holds, by kind: worked out once for each kind."""

    world: World
    _found: dict[tuple[Kind, int], list[Box]] = field(default_factory=dict)

    def at(self, kind: Kind, place: int) -> list[Box]:
        """Return the boxes of the place-th rank of a stage."""
        key = (kind, place)
        if key not in self._found:
            held = spans(self.world.layout(kind.dim), kind.shape, divmod(place, self.world.tp))
            self._found[key] = [span.box for span in held]
        return self._found[key]


def holdings(tensors: Tensors, world: World) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Return what all ranks send one another before a save: digests of tables, tables (once each), boxes."""
    boxes = Boxes(world)
    names, tables, columns = [], [], []
    for stage in range(world.pp):
        held = tensors.of_stage(world, stage)
        specs = tuple(tensors.specs[i] for i in held)
        for place in range(world.dp * world.tp):
            per_tensor = [boxes.at(tensors.kinds[i], place) for i in held]
            counts = np.array([len(found) for found in per_tensor], dtype=np.int64)
            flat = [n for found in per_tensor for box in found for n in (*box.offset, *box.shape)]
            mine = Holdings(specs, counts, np.array(flat, dtype=np.int64))
            columns.append(mine.box_bytes())
            tables.append(mine.table_bytes() if place == 0 else b"")
            names.append(digest(tables[-1]) if place == 0 else names[-1])
    return names, tables, columns


def manifest_of(tensors: Tensors, world: World) -> Manifest:
    """Return the manifest that a save on ``world`` would commit, with empty digests and one pack a place."""
    boxes, num_places = Boxes(world), world.dp * world.tp
    records = tuple(TensorRecord(s.path, s.dtype, s.shape, tile_shape(s.shape, s.item_bytes)) for s in tensors.specs)
    columns: dict[Kind, dict[str, Int64s]] = {}
    for kind, record in zip(tensors.kinds, records, strict=True):
        if kind not in columns:
            columns[kind] = _chunks_of_kind(kind, record, [boxes.at(kind, place) for place in range(num_places)])
    parts = [columns[kind] for kind in tensors.kinds]
    counts = np.array([len(part["tile"]) for part in parts], dtype=np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    stages = [world.stage_of(layer, tensors.num_layers) for layer in tensors.layers]
    num_rows = int(first[-1])
    num_partial = [len(part["partial_row"]) for part in parts]
    partial_ndim = np.repeat([len(kind.shape) for kind in tensors.kinds], num_partial)
    place = [part["place"] + stage * num_places for part, stage in zip(parts, stages, strict=True)]
    partial_row = [part["partial_row"] + start for part, start in zip(parts, first[:-1], strict=True)]
    chunks = ChunkTable(
        first=first.astype(np.uint64),
        tile=np.concatenate([part["tile"] for part in parts]).astype(np.uint32),
        digest=np.zeros((num_rows, 32), np.uint8),
        pack=np.concatenate(place).astype(np.uint32),
        offset=np.zeros(num_rows, np.uint64),
        length=np.concatenate([part["length"] for part in parts]).astype(np.uint32),
        codec=np.zeros(num_rows, np.uint8),
        partial_row=np.concatenate(partial_row).astype(np.uint64),
        partial_box=np.concatenate([part["partial_box"] for part in parts]).astype(np.uint64),
        partial_start=np.concatenate([[0], np.cumsum(2 * partial_ndim)]).astype(np.int64),
    )
    packs = tuple(PackRecord(f"{i:064x}", 1 << 40) for i in range(world.size))
    tree = DictNode(tuple((str(i), TensorNode()) for i in range(len(records))))
    return Manifest("run", 0, 0.0, "0" * 32, world.size, tree, records, chunks, packs)


def _chunks_of_kind(kind: Kind, record: TensorRecord, boxes: Sequence[Sequence[Box]]) -> dict[str, Int64s]:
    """Return the columns of one tensor's chunks: what every distinct box has in every tile, by tile."""
    grid = TileGrid(record.shape, record.tile)
    seen: dict[Box, int] = {}
    for place, held in enumerate(boxes):
        for box in held:
            seen.setdefault(box, place)
    cuts = [(grid.cut_columns(box), place) for box, place in seen.items()]
    tile = np.concatenate([cut.indexes for cut, _ in cuts])
    offsets = np.concatenate([cut.offsets for cut, _ in cuts])
    sizes = np.concatenate([cut.sizes for cut, _ in cuts])
    whole = np.concatenate([cut.whole for cut, _ in cuts])
    place = np.concatenate([np.full(len(cut.indexes), place) for cut, place in cuts])
    order = np.lexsort([*offsets.T[::-1], tile])
    partial = np.flatnonzero(~whole[order])
    box_columns = np.concatenate([offsets[order][partial], sizes[order][partial]], axis=1)
    return {
        "tile": tile[order],
        "place": place[order],
        "length": sizes[order].prod(axis=1) * item_bytes(kind.dtype),
        "partial_row": partial,
        "partial_box": box_columns.reshape(-1),
    }


@dataclass(frozen=True, slots=True)
class Planned:
    """What planning came to."""

    seconds: dict[str, float]
    """By step; each is what one rank takes, unless its name says that it is for all."""
    num_chunks: int
    num_rounds: int
    sent_bytes: int
    """By one rank to plan the save."""
    rows_sent_bytes: int
    """By one rank to plan the load."""
    save_plan: SavePlan
    share: ReadShare
    written: Int64s  # [ranks that save] bytes
    needed: Int64s  # [ranks that load] bytes of what each holds
    read: Int64s  # [ranks that load] bytes from storage
    received: Int64s  # [ranks that load] bytes from other ranks


def plan(tensors: Tensors, source: World, target: World, *, rank: int = 0) -> Planned:
    """Plan a save on one world and the load of it on another, as ``rank`` does in each, and prove both.

    Raises:
        MismatchError: an element is not held exactly once, before or after.
        CorruptionError: an element would not be written exactly once.
        AssertionError: a row would not be read once, by a rank that needs it.
    """
    clock = _Clock()
    names, tables, columns = holdings(tensors, source)
    clock.lap("holdings of all ranks")
    save_plan = plan_of(names, tables, columns, rank=rank % source.size)
    clock.lap("save plan")
    manifest = manifest_of(tensors, source)
    clock.lap("manifest, for all ranks")
    prove_covers(manifest)
    clock.lap("proof that all is written once, by the coordinator")
    # Proves that the boxes of the other world, too, are all of every tensor and overlap nowhere.
    plan_of(*holdings(tensors, target), rank=rank % target.size)
    clock.lap("proof that all is held once afterwards")
    at = rank % target.size
    wants = _wants(tensors, target, at)
    clock.lap("wants")
    needs = chunks_needed(manifest, wants)
    clock.lap("chunks needed")
    needed = rows_needed(manifest, tensors, target)
    clock.lap("rows needed, for all ranks")
    share = share_reads(manifest, needed, rank=at, round_bytes=ROUND_BYTES)
    clock.lap("share of the reads")
    if [need.row for need in needs] != needed[at].tolist():
        raise AssertionError("the rows of this rank are not those that its wants touch")
    read, received = _check_reads(manifest, needed, share)
    return Planned(
        seconds=clock.seconds,
        num_chunks=len(manifest.chunks),
        num_rounds=len(share.rounds),
        sent_bytes=len(columns[rank % source.size]),
        rows_sent_bytes=8 * len(needs),
        save_plan=save_plan,
        share=share,
        written=save_plan.bytes_by_rank,
        needed=_bytes_held(tensors, target),
        read=read,
        received=received,
    )


def rows_needed(manifest: Manifest, tensors: Tensors, world: World) -> list[Int64s]:
    """Return, per rank of a world, the ascending rows that it needs; worked out once for each kind and place."""
    boxes, num_places = Boxes(world), world.dp * world.tp
    first = manifest.chunks.first.astype(np.int64)
    by_kind: dict[Kind, list[Int64s]] = {}
    for i, kind in enumerate(tensors.kinds):
        if kind in by_kind:
            continue
        offsets, sizes = manifest.chunks.boxes_of(manifest.tensors[i], manifest.chunks.rows(i))
        touched = []
        for place in range(num_places):
            hit = np.zeros(len(offsets), dtype=bool)
            for box in boxes.at(kind, place):
                hit |= ((offsets < np.array(box.end)) & (offsets + sizes > np.array(box.offset))).all(axis=1)
            touched.append(np.flatnonzero(hit))
        by_kind[kind] = touched
    found = []
    for stage in range(world.pp):
        held = tensors.of_stage(world, stage)
        found += [
            np.concatenate([by_kind[tensors.kinds[i]][place] + first[i] for i in held]) for place in range(num_places)
        ]
    return found


def _wants(tensors: Tensors, world: World, rank: int) -> list[Want]:
    """Return what a rank asks for."""
    boxes = Boxes(world)
    stage, place = divmod(rank, world.dp * world.tp)
    return [Want(i, box) for i in tensors.of_stage(world, stage) for box in boxes.at(tensors.kinds[i], place)]


def _bytes_held(tensors: Tensors, world: World) -> Int64s:
    """Return the bytes that each rank of a world holds."""
    boxes, num_places = Boxes(world), world.dp * world.tp
    held = np.zeros((world.pp, num_places), dtype=np.int64)
    for stage in range(world.pp):
        for i in tensors.of_stage(world, stage):
            size = item_bytes(tensors.kinds[i].dtype)
            at = (sum(box.volume for box in boxes.at(tensors.kinds[i], place)) * size for place in range(num_places))
            held[stage] += np.fromiter(at, np.int64, num_places)
    return held.reshape(-1)


def _check_reads(manifest: Manifest, needed: Sequence[Int64s], share: ReadShare) -> tuple[Int64s, Int64s]:
    """Return (bytes read, bytes received) by rank, after proving that each row is read by one rank that needs it."""
    lengths = manifest.chunks.length.astype(np.int64)
    rows = np.concatenate(needed)
    ranks = np.repeat(np.arange(len(needed)), [len(found) for found in needed])
    reads = share.reader[rows] == ranks
    if not np.array_equal(np.sort(rows[reads]), np.unique(rows)) or (share.reader[rows] == NOBODY).any():
        raise AssertionError("a row is not read exactly once by a rank that needs it")
    sizes = lengths[rows]
    read = np.bincount(ranks[reads], weights=sizes[reads], minlength=len(needed))
    received = np.bincount(ranks[~reads], weights=sizes[~reads], minlength=len(needed))
    return read.astype(np.int64), received.astype(np.int64)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._mark = time.perf_counter()

    def lap(self, name: str) -> None:
        """Note the time since the last lap."""
        now = time.perf_counter()
        self.seconds[name] = now - self._mark
        self._mark = now


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=Model().num_layers, help="of the model (default: %(default)s)")
    parser.add_argument("--moments", action="store_true", help="Adam's two moments in float32 beside the weights")
    parser.add_argument("--from", dest="source", default="8,16,32", metavar="TP,PP,DP", help="default: %(default)s")
    parser.add_argument("--to", dest="target", default="4,8,128", metavar="TP,PP,DP", help="default: %(default)s")
    arguments = parser.parse_args()
    tensors = Tensors.of(Model(num_layers=arguments.layers), moments=arguments.moments)
    source, target = (World(*map(int, text.split(","))) for text in (arguments.source, arguments.target))
    for line in table(tensors, source, target, plan(tensors, source, target, rank=1234)):
        print(line)


def table(tensors: Tensors, source: World, target: World, planned: Planned) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"{source.size:,} ranks (tp {source.tp}, pp {source.pp}, dp {source.dp}) to "
    yield f"{target.size:,} ranks (tp {target.tp}, pp {target.pp}, dp {target.dp}), dim 0 cut over dp on both"
    yield ""
    yield f"| tensors | {len(tensors.specs):,} |"
    yield "| --- | --- |"
    yield f"| bytes | {tensors.total_bytes:,} |"
    yield f"| chunks | {planned.num_chunks:,} |"
    yield f"| sent by a rank to plan the save | {planned.sent_bytes:,} bytes |"
    yield f"| sent by a rank to plan the load | {planned.rows_sent_bytes:,} bytes |"
    yield f"| rounds of exchange | {planned.num_rounds} |"
    yield f"| peak memory of this process | {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB |"
    yield ""
    yield "| bytes per rank | least | mean | most |"
    yield "| --- | --- | --- | --- |"
    columns = ("written", "needed", "read", "received")
    for name in columns:
        values = getattr(planned, name)
        yield f"| {name} | {values.min():,} | {values.mean():,.0f} | {values.max():,} |"
    yield ""
    yield "| step | seconds |"
    yield "| --- | --- |"
    for name, seconds in planned.seconds.items():
        yield f"| {name} | {seconds:.2f} |"


if __name__ == "__main__":
    main()
