"""Fill: verified chunks go to their places in the target's memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vescale_ckpt.stage.raw import as_integers
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.plan.load_plan import ChunkNeed
    from vescale_ckpt.state.leaf import Piece


class Filler:
    """Copies parts of chunks into pieces; any number of threads may deliver, for chunks never overlap."""

    def __init__(self, manifest: Manifest, pieces: Sequence[Piece]) -> None:
        self._manifest = manifest
        self._pieces = pieces
        self._lock = threading.Lock()
        self._touched: set[int] = set()

    def deliver(self, need: ChunkNeed, raw: torch.Tensor) -> None:
        """Copy a verified chunk to everything that wants a part of it; ``raw`` is uint8, 1-D, aligned."""
        stored = dtype_from_name(self._manifest.tensors[need.tensor].dtype)
        chunk = raw.view(stored).view(need.box.shape)
        with self._lock:
            self._touched.add(need.tensor)
        for copy in need.copies:
            view = self._pieces[copy.want].view.detach()
            target = view[copy.target.slices] if copy.target.shape else view
            source = chunk[copy.source.slices] if copy.source.shape else chunk
            if target.dtype == stored:  # by integers, so that every bit survives
                target, source = as_integers(target), as_integers(source)
            target.copy_(source)

    def touched(self) -> list[str]:
        """Return the names of the tensors of which anything was filled."""
        with self._lock:
            return sorted(fqn(self._manifest.tensors[t].path) for t in self._touched)
