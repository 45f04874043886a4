"""Layouts by name, and DTensors laid out by them: what reshard questions speak of."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_ckpt.layout import layout as layouts
from vescale_ckpt.layout import placement as placements


@dataclass(frozen=True, slots=True)
class Spread:
    """A mesh and what each of its axes does: ``R``, ``S<dim>``, or ``T<dim>/<split>`` for a strided shard."""

    mesh: tuple[int, ...]
    cuts: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """Ranks in the mesh."""
        return int(np.prod(self.mesh))

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.mesh))} {','.join(self.cuts)}"

    @classmethod
    def parse(cls, text: str) -> Spread:
        """Return the layout of ``str``."""
        mesh, cuts = text.split(" ")
        return cls(tuple(map(int, mesh.split("x"))), tuple(cuts.split(",")))

    def device_mesh(self) -> DeviceMesh:
        """Return the mesh; all ranks of the world must ask for it, in it or not: it makes process groups by turns."""
        return _device_mesh(self.mesh)

    def dtensor(self, full: torch.Tensor, rank: int) -> DTensor:
        """Return a full tensor laid out, on one rank of a larger world that is in the mesh; its memory is new."""
        mesh = self.device_mesh()
        coordinate = tuple(int(i) for i in np.unravel_index(rank, self.mesh))
        layout = layouts.Layout(self.mesh, tuple(_ours(cut) for cut in self.cuts))
        shape = tuple(full.shape)
        local = torch.empty(layouts.local_shape(layout, shape, coordinate), dtype=full.dtype)
        for span in layouts.spans(layout, shape, coordinate):
            local[span.local.slices] = full[span.box.slices]
        return DTensor.from_local(
            local, mesh, [_torchs(cut) for cut in self.cuts], run_check=False, shape=full.shape, stride=full.stride()
        )


@functools.cache
def _device_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Return the mesh of a shape, made once: each makes process groups, which take far longer than a small load."""
    return DeviceMesh("cpu", torch.arange(int(np.prod(shape))).reshape(shape))


def _ours(cut: str) -> Any:
    if cut == "R":
        return placements.Replicate()
    if cut[0] == "S":
        return placements.Shard(int(cut[1:]))
    dim, split = cut[1:].split("/")
    return placements.StridedShard(int(dim), int(split))


def _torchs(cut: str) -> Any:
    if cut == "R":
        return Replicate()
    if cut[0] == "S":
        return Shard(int(cut[1:]))
    dim, split = cut[1:].split("/")
    return _StridedShard(int(dim), split_factor=int(split))
