"""Exchange: chunks that several ranks need are read by one and handed to the others, round by round."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from vescale_ckpt.stage.raw import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.execute.read import Reader
    from vescale_ckpt.plan.load_plan import ChunkNeed
    from vescale_ckpt.plan.read_share import SharedRound


class Exchange:
    """The shared reading of one load. All ranks take the same rounds in the same order."""

    def __init__(self, group: Group, reader: Reader, needs: Mapping[int, ChunkNeed]) -> None:
        self._group = group
        self._reader = reader
        self._needs = needs
        self._held: dict[int, torch.Tensor] = {}
        self.bytes_received = 0
        """From other ranks, so far."""

    def read(self, turn: SharedRound) -> None:
        """Read and keep the chunks of a round whose reader this rank is; no collective."""
        mine = [self._needs[int(row)] for row in turn.rows[turn.reader == self._group.rank]]
        self._held = {}

        def keep(need: ChunkNeed, raw: torch.Tensor) -> None:
            self._held[need.row] = raw.clone()

        self._reader.read(mine, keep)

    def swap(self, turn: SharedRound, deliver: Callable[[ChunkNeed, torch.Tensor], None]) -> None:
        """Hand the chunks of a round to all that want them, and deliver those that this rank wants; a collective."""
        rank, ranks = self._group.rank, np.arange(self._group.world_size + 1)
        begins = np.searchsorted(turn.to_rank, ranks)
        places = [turn.to_place[begin:end] for begin, end in pairwise(begins)]
        outgoing = [self._joined([int(row) for row in turn.rows[to_send]]) for to_send in places]
        others = turn.reader != rank
        sizes = np.array([aligned(int(n)) for n in turn.raw_bytes], dtype=np.int64)
        incoming = np.bincount(turn.reader[others], weights=sizes[others], minlength=self._group.world_size)
        received = self._group.exchange(outgoing, [int(n) for n in incoming])
        for row in turn.rows[turn.reader == rank]:
            deliver(self._needs[int(row)], self._held[int(row)])
        for other in np.unique(turn.reader[others]).tolist():
            data, start = received[other], 0
            comes = turn.reader == other
            for row, num_bytes in zip(turn.rows[comes].tolist(), turn.raw_bytes[comes].tolist(), strict=True):
                # A copy at the start of its own memory: items may be read through wider types than bytes.
                raw = data[start : start + num_bytes].clone()
                deliver(self._needs[row], raw)
                start += aligned(num_bytes)
                self.bytes_received += num_bytes
        self._held = {}

    def _joined(self, rows: list[int]) -> torch.Tensor:
        total = sum(aligned(self._held[row].numel()) for row in rows)
        out = torch.empty(total, dtype=torch.uint8)
        start = 0
        for row in rows:
            raw = self._held[row]
            out[start : start + raw.numel()].copy_(raw)
            start += aligned(raw.numel())
        return out
