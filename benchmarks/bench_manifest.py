"""How long does it take to open a snapshot of a very large model?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.case import Case, Question, Ratio
from benchmarks.measure import measure
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.format.manifest import decode_manifest, encode_manifest
from vescale_ckpt.format.records import ChunkTable, Manifest, PackRecord, TensorRecord
from vescale_ckpt.geometry.tiles import TileGrid, tile_shape
from vescale_ckpt.plan.load_plan import prove_cover
from vescale_ckpt.state.tree import DictNode, TensorNode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.bench import Bench
    from benchmarks.case import Scale
    from benchmarks.measure import Sample

ENCODE, OPEN, PROVE, INDEX = "encode", "open", "prove every cover", "index for dedup"
_UNIT = "seconds allowed"
_PACK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunks(Case):
    """A manifest of about so many chunks."""

    num_chunks: int


def cases(scale: Scale) -> Sequence[Chunks]:
    most = scale.num_chunks
    counts = sorted({max(500, most // 4**i) for i in range(4)})
    ratios = (
        Ratio(name="CPU seconds to open", of=(OPEN, "cpu_seconds"), to=(_UNIT, "seconds"), at_most=1.0),
        Ratio(name="bytes a chunk", of=(OPEN, "bytes_stored"), to=(OPEN, "chunks"), at_most=64.0, exact=True),
    )
    return tuple(
        Chunks(
            name=f"{count:,} chunks",
            num_chunks=count,
            sweep=("chunks", count),
            curve="manifest",
            repeats=3,
            ratios=ratios if count == counts[-1] else (),
        )
        for count in counts
    )


def run(case: Chunks, bench: Bench) -> None:
    manifest = manifest_of(case.num_chunks)
    data = encode_manifest(manifest)
    size = {"bytes_stored": len(data), "chunks": len(manifest.chunks)}

    def timed(work: Callable[[], object]) -> Callable[[int], Sample]:
        def act(turn: int) -> Sample:
            del turn
            with measure() as taken:
                work()
            taken.counters |= size
            return taken.sample

        return act

    def prove() -> None:
        for tensor in range(len(manifest.tensors)):
            prove_cover(manifest, tensor)

    bench.compare(
        {
            ENCODE: timed(lambda: encode_manifest(manifest)),
            OPEN: timed(lambda: decode_manifest(data)),
            PROVE: timed(prove),
            INDEX: timed(lambda: DedupIndex([manifest])),
        }
    )
    if decode_manifest(data).chunks != manifest.chunks:
        raise RuntimeError("the manifest that was opened is not the one that was encoded")
    with measure() as taken:
        taken.counters["seconds"] = 1.0
    bench.add(_UNIT, taken.sample)


def manifest_of(num_chunks: int) -> Manifest:
    """Return a manifest of matrices like those of a large model, with about so many chunks."""
    shape = (8192, 28_672)
    tile = tile_shape(shape, 2)
    each = TileGrid(shape, tile).num_tiles
    if num_chunks < 4 * each:
        shape = (64, 1024)
        tile, each = shape, 1
    num_tensors = num_chunks // each
    names = [f"layers.{i // 8}.weight.{i % 8}" for i in range(num_tensors)]
    total = num_tensors * each
    length = min(4 << 20, tile[0] * tile[1] * 2)
    per_pack = _PACK_BYTES // length
    rng = np.random.default_rng(0)
    chunk = np.arange(total)
    chunks = ChunkTable(
        first=np.arange(0, total + 1, each, dtype=np.uint64),
        tile=np.tile(np.arange(each, dtype=np.uint32), num_tensors),
        digest=rng.integers(0, 256, (total, 32), np.uint8),
        pack=(chunk // per_pack).astype(np.uint32),
        offset=(chunk % per_pack * length).astype(np.uint64),
        length=np.full(total, length, np.uint32),
        codec=np.zeros(total, np.uint8),
        partial_row=np.zeros(0, np.uint64),
        partial_box=np.zeros(0, np.uint64),
        partial_start=np.zeros(1, np.int64),
    )
    packs = tuple(PackRecord(f"{i:064x}", _PACK_BYTES + 4096) for i in range(-(-total // per_pack)))
    tensors = tuple(TensorRecord(("model", name), "bfloat16", shape, tile) for name in names)
    tree = DictNode((("model", DictNode(tuple((name, TensorNode()) for name in names), union=True)),))
    return Manifest("run", 1, 1.0, "0" * 32, 1024, tree, tensors, chunks, packs)


QUESTION = Question(
    name="manifest",
    title="Manifests of millions of chunks",
    text=(
        "Matrices of 8,192 x 28,672 bfloat16, as many as give so many chunks. Opening decodes and checks every table; "
        "proving shows that chunks cover each tensor exactly once, as a load does for what it reads and a commit for "
        "all."
    ),
    cases=cases,
    run=run,
    columns=("bytes_stored", "chunks"),
)
