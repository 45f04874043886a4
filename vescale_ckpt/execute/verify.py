"""Verify: read everything that a snapshot refers to and list all that is wrong with it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale_ckpt.errors import FormatError, NotFoundError
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import ChunkNeed, prove_cover

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    import torch

    from vescale_ckpt.format.records import Manifest
    from vescale_storage.backend import Backend


@dataclass(slots=True)
class VerifyReport:
    """What verifying one snapshot found."""

    chunks: int = 0
    bytes_read: int = 0
    packs: int = 0
    problems: list[str] = field(default_factory=list)
    """One line for each thing that is wrong; empty for a sound snapshot."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_snapshot(
    backend: Backend,
    manifest: Manifest,
    options: ReadOptions,
    progress: Callable[[int], None] | None = None,
    *,
    sample: int | None = None,
    seed: int | None = None,
) -> VerifyReport:
    """Return what is wrong with a snapshot after reading all of its chunks and the footers of its packs.

    Args:
        backend: where it lies.
        manifest: what it is.
        options: how to read.
        progress: called with the stored bytes of each pack that was read.
        sample: read only so many chunks, drawn at random; the footers of all packs all the same.
        seed: of the draw; None for another draw each time.
    """
    report = VerifyReport()
    for tensor, record in enumerate(manifest.tensors):
        if record.alias_of is None:
            try:
                prove_cover(manifest, tensor)
            except FormatError as error:
                report.problems.append(str(error))
    chunks = manifest.chunks
    drawn: Container[int] = range(len(chunks))
    if sample is not None and sample < len(chunks):
        drawn = set(random.Random(seed).sample(range(len(chunks)), sample))  # noqa: S311 - no secret
    for pack, needs in _by_pack(manifest, drawn).items():
        reader = Reader(backend, manifest, options)
        problems = _read(reader, needs, [pack])
        if problems and needs:  # find every damaged chunk, not the first
            problems = [p for need in needs for p in _read(reader, [need], [])] + _read(reader, [], [pack])
        report.problems += list(dict.fromkeys(problems))
        report.chunks += len(needs)
        report.packs += 1
        report.bytes_read += reader.counters.bytes_read
        if progress is not None:
            progress(sum(int(chunks.length[need.row]) for need in needs))
    return report


def _by_pack(manifest: Manifest, drawn: Container[int]) -> dict[int, list[ChunkNeed]]:
    """Return, of every pack, the chunks to read: those whose rows were drawn."""
    chunks = manifest.chunks
    by_pack: dict[int, list[ChunkNeed]] = {pack: [] for pack in range(len(manifest.packs))}
    for tensor in range(len(manifest.tensors)):
        rows = chunks.rows(tensor)
        offsets, sizes = chunks.boxes_of(manifest.tensors[tensor], rows)
        for row, offset, size in zip(rows, offsets.tolist(), sizes.tolist(), strict=True):
            if row in drawn:
                need = ChunkNeed(row, tensor, Box(tuple(offset), tuple(size)), ())
                by_pack[int(chunks.pack[row])].append(need)
    return by_pack


def _read(reader: Reader, needs: list[ChunkNeed], whole_packs: list[int]) -> list[str]:
    try:
        reader.read(needs, _ignore, whole_packs)
    except (FormatError, NotFoundError) as error:
        return [str(error)]
    return []


def _ignore(need: ChunkNeed, raw: torch.Tensor) -> None:
    """Take a verified chunk and do nothing with it."""
