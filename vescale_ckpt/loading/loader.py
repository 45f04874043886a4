"""Load: the story of one load, from a snapshot to the caller's state, on any layout.

Everything is validated before anything of the caller's is touched. Then every rank reads the chunks that it alone
needs; those that several ranks need are read by one of them and exchanged, in rounds of bounded memory, unless each
reads them faster. Last, plain values are installed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vescale_ckpt.adapters.restore import Restore, plan_restore, unexpected_keys
from vescale_ckpt.errors import MismatchError, VeScaleError
from vescale_ckpt.execute.exchange import Exchange
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.execute.manifests import fetch_manifest, open_manifest
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.plan.load_plan import ChunkNeed, Want, chunks_needed, same_bytes
from vescale_ckpt.plan.read_cost import RECORD_BYTES, ReadCost
from vescale_ckpt.plan.read_share import NOBODY, ReadShare, share_reads
from vescale_ckpt.trace import Phases, write_trace
from vescale_storage.ref_records import SnapshotName, decode_ref, encode_ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vescale_ckpt.adapters.options import RestoreOptions
    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.state.leaf import Piece
    from vescale_ckpt.store import Store
    from vescale_storage.refs import Ref

_ROUND_BYTES = 128 << 20
"""Of chunks that one rank holds, sends and receives in a round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What a load did. Bytes and counts are of this rank."""

    run: str
    step: int
    version: int
    bytes_needed: int
    """Of all boxes that this rank's state holds."""
    bytes_read: int
    """Of chunks, from storage."""
    bytes_exchanged: int
    """Of chunks, from other ranks."""
    bytes_overhead: int
    """Footers read to prove packs whole; the manifest is read by one rank."""
    chunks: int
    requests: int
    reread: int
    """Chunks and footers that arrived damaged and were read again."""
    healed: int
    """Those of them that only the mirror has sound: ``Store.heal`` repairs the store."""
    notes: tuple[str, ...]
    """What the options allowed: casts, ignored and renamed keys."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase: open, plan, read, finish; and total."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What one rank does in a load."""

    restore: Restore
    pieces: tuple[Piece, ...]
    needs: dict[int, ChunkNeed]
    """By row."""
    share: ReadShare
    whole_packs: tuple[int, ...]
    """Packs that this rank proves whole."""
    bytes_needed: int


class Loader:
    """Loads snapshots of a store; all ranks make the same calls in the same order."""

    def __init__(self, store: Store, group: Group, read_options: ReadOptions) -> None:
        self._store = store
        self._group = group
        self._read_options = read_options

    def load(
        self,
        state: Any,
        *,
        run: str,
        step: int | None,
        options: RestoreOptions,
        verify_first: bool = False,
    ) -> LoadReport:
        """Fill ``state`` in place from ``run@step`` (None: the newest) and return what it took."""
        began = time.monotonic()
        phases = Phases()
        ref, manifest = self._open(run, step)
        phases.end("open", began)
        phase = f"loading {ref.run}@{ref.step}"
        mark = time.monotonic()
        plan = self._plan(state, ref, manifest, options)
        phases.end("plan", mark)
        mark = time.monotonic()
        if verify_first:
            self._read(manifest, plan, Filler(manifest, ()), phase, fill=False)
        filler = Filler(manifest, plan.pieces)
        reader, exchanged = self._read(manifest, plan, filler, phase, fill=True)
        phases.end("read", mark)
        mark = time.monotonic()
        self._group.attempt(phase, plan.restore.finish)
        phases.end("finish", mark)
        phases.end("total", began, "whole load")
        if self._read_options.trace_folder is not None:
            title = f"{ref.run}@{ref.step} load"
            write_trace(self._read_options.trace_folder, phases, title=title, rank=self._group.rank)
        return LoadReport(
            run=ref.run,
            step=ref.step,
            version=ref.version,
            bytes_needed=plan.bytes_needed,
            bytes_read=reader.counters.bytes_read,
            bytes_exchanged=exchanged,
            bytes_overhead=reader.counters.bytes_footers,
            chunks=len(plan.needs),
            requests=reader.counters.requests,
            reread=reader.counters.reread,
            healed=reader.counters.healed,
            notes=plan.restore.notes,
            seconds=phases.seconds,
        )

    def _open(self, run: str, step: int | None) -> tuple[Ref, Manifest]:
        """Return the same snapshot on all ranks: one looks, the others are told."""
        phase = f"opening {run}@{'newest' if step is None else step}"

        def look() -> tuple[bytes, bytes, bytes]:
            if self._group.rank != 0:
                return b"", b"", b""
            ref = self._store.resolve(SnapshotName(run, step))
            return ref.key.encode(), encode_ref(ref), fetch_manifest(self._store.reading, ref)

        key, ref_bytes, data = (self._group.broadcast(sent) for sent in self._group.attempt(phase, look))
        ref = decode_ref(ref_bytes, key.decode())
        manifest = self._group.attempt(phase, lambda: open_manifest(data, ref))
        self._store.keep(ref, manifest)
        return ref, manifest

    def _plan(self, state: Any, ref: Ref, manifest: Manifest, options: RestoreOptions) -> _Plan:
        """Validate everything on all ranks, then divide the reading among them."""
        phase = f"planning the load of {ref.run}@{ref.step}"

        def prepare() -> tuple[Restore, tuple[Piece, ...], list[ChunkNeed]]:
            restore = plan_restore(
                state,
                manifest.tree,
                {record.path: record for record in manifest.tensors},
                rank=self._group.rank,
                world_size=self._group.world_size,
                options=options,
                saved_world_size=manifest.world_size,
                same_content=lambda a, b: same_bytes(manifest, manifest.by_path[a], manifest.by_path[b]),
            )
            pieces = [(manifest.by_path[leaf.path], piece) for leaf in restore.leaves for piece in leaf.pieces]
            needs = [] if restore.problems else chunks_needed(manifest, [Want(t, piece.box) for t, piece in pieces])
            return restore, tuple(piece for _, piece in pieces), needs

        restore, pieces, needs = self._group.attempt(phase, prepare)
        self._refuse(ref, (*restore.problems, *self._unexpected(manifest, restore, options)))
        rows = np.array([need.row for need in needs], dtype="<i8")
        told = self._group.all_gather(self._read_options.cost.encode() + rows.tobytes())
        needed = [np.frombuffer(data, dtype="<i8", offset=RECORD_BYTES) for data in told]
        cost = ReadCost.decode(told[0][:RECORD_BYTES])
        share = share_reads(manifest, needed, rank=self._group.rank, round_bytes=_ROUND_BYTES, cost=cost)
        return _Plan(
            restore=restore,
            pieces=pieces,
            needs={need.row: need for need in needs},
            share=share,
            whole_packs=_whole_packs(manifest, share, rank=self._group.rank),
            bytes_needed=sum(piece.view.numel() * piece.view.element_size() for piece in pieces),
        )

    def _unexpected(self, manifest: Manifest, restore: Restore, options: RestoreOptions) -> tuple[str, ...]:
        """Return what is stored and has no place on any rank; one rank alone has told it among its problems."""
        if self._group.world_size == 1:
            return ()
        flags = [np.frombuffer(data, dtype=np.bool_) for data in self._group.all_gather_fixed(restore.taken.tobytes())]
        return unexpected_keys(manifest.tree, np.logical_or.reduce(flags), options)

    def _refuse(self, ref: Ref, problems: Sequence[str]) -> None:
        """Raise every rank's problems on all ranks."""
        sent = self._group.all_gather(json.dumps(list(problems)).encode())
        by_line: dict[str, list[int]] = {}
        for rank, data in enumerate(sent):
            for line in json.loads(data):
                by_line.setdefault(line, []).append(rank)
        if not by_line:
            return
        lines = [
            line if len(ranks) == self._group.world_size else f"rank {', '.join(map(str, ranks))}: {line}"
            for line, ranks in by_line.items()
        ]
        shown = "\n  ".join(lines[:50]) + (f"\n  ... and {len(lines) - 50} more" if len(lines) > 50 else "")
        raise MismatchError(
            f"cannot load {ref.run}@{ref.step} into this state, {len(lines)} problems; nothing was changed:\n  {shown}",
            problems=tuple(lines),
            snapshot=f"{ref.run}@{ref.step}",
        )

    def _read(self, manifest: Manifest, plan: _Plan, filler: Filler, phase: str, *, fill: bool) -> tuple[Reader, int]:
        """Read and exchange; return the reader, with its counters, and the bytes that came from other ranks."""
        reader = Reader(self._store.reading, manifest, self._read_options)
        deliver = filler.deliver if fill else _ignore

        def own() -> None:
            reader.read([plan.needs[int(row)] for row in plan.share.own], deliver, plan.whole_packs)

        exchange = Exchange(self._group, reader, plan.needs)
        try:
            self._group.attempt(phase, own)
            for turn in plan.share.rounds:
                self._group.attempt(phase, lambda turn=turn: exchange.read(turn))  # type: ignore[misc]
                if fill:
                    self._group.attempt(phase, lambda turn=turn: exchange.swap(turn, deliver))  # type: ignore[misc]
        except VeScaleError as error:
            _tell_touched(error, filler)
            raise
        return reader, exchange.bytes_received


def _whole_packs(manifest: Manifest, share: ReadShare, *, rank: int) -> tuple[int, ...]:
    """Return the packs that this rank proves whole: of each pack that is read, its lowest reader does."""
    read = np.flatnonzero(share.reader != NOBODY)
    lowest = np.full(len(manifest.packs), np.iinfo(share.reader.dtype).max)
    np.minimum.at(lowest, manifest.chunks.pack[read], share.reader[read])
    return tuple(int(pack) for pack in np.flatnonzero(lowest == rank))


def _tell_touched(error: VeScaleError, filler: Filler) -> None:
    """Say in the error which of the caller's tensors hold loaded bytes already."""
    touched = filler.touched()
    error.context["filled"] = touched
    if isinstance(error, MismatchError):
        return
    if touched:
        shown = ", ".join(f"'{name}'" for name in touched[:8])
        shown += f" and {len(touched) - 8} more" if len(touched) > 8 else ""
        note = f"already filled, in whole or in part: {shown}; load another snapshot before you go on"
    else:
        note = "nothing of the state was changed"
    error.args = (f"{error.message} - {note}",)
    error.message = str(error.args[0])


def _ignore(need: ChunkNeed, raw: torch.Tensor) -> None:
    """Take a verified chunk and do nothing with it."""
