"""Sides: what a comparison needs of a checkpoint, be it a snapshot of a store or another library's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from vescale_ckpt.errors import NotFoundError
from vescale_ckpt.state.tree import ValueNode, fqn, walk
from vescale_storage.digest import digest_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.snapshot import Snapshot


class Described(Protocol):
    """What is known of a tensor before any of it is read."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its items."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""

    @property
    def alias_of(self) -> str | None:
        """The name of the tensor that this one is tied to."""

    @property
    def num_bytes(self) -> int:
        """In memory."""


class Foreign(Protocol):
    """Another library's checkpoint, opened in place."""

    @property
    def url(self) -> str:
        """Where it is."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Its plain values."""

    def tensors(self) -> Mapping[str, Described]:
        """Return name -> what is known of every tensor."""

    def read(self, name: str, box: Box, /) -> torch.Tensor:
        """Return a box of a tensor."""


def _unknown(_: str) -> None:
    """Return nothing: what a tensor's bytes are can only be seen by reading it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two checkpoints of a comparison."""

    name: str
    tensors: Mapping[str, Described]
    read: Callable[[str, Box], torch.Tensor]
    values: Mapping[str, Any] = field(default_factory=dict)
    content: Callable[[str], bytes | None] = _unknown
    """Returns what is equal for two tensors of equal dtype and shape only if their bytes are; None where that is not
    known without reading them."""

    def below(self, prefix: str) -> Side:
        """Return what is below a dotted name, under names relative to it; all of it for an empty one.

        Raises:
            NotFoundError: nothing is below it.
        """
        if not prefix:
            return self
        start = f"{prefix}."
        tensors = {name.removeprefix(start): t for name, t in self.tensors.items() if name.startswith(start)}
        values = {name.removeprefix(start): v for name, v in self.values.items() if name.startswith(start)}
        if not tensors and not values:
            raise NotFoundError(f"cannot compare what is below {prefix!r} in {self.name}: nothing is", fqn=prefix)
        return Side(
            name=f"{prefix} of {self.name}",
            tensors=tensors,
            values=values,
            read=lambda name, box: self.read(start + name, box),
            content=lambda name: self.content(start + name),
        )


def side_of_snapshot(snapshot: Snapshot) -> Side:
    """Return a snapshot of a store as one side."""
    manifest = snapshot.manifest
    tensors = snapshot.tensors()
    index = {name: manifest.find(info.path) for name, info in tensors.items()}
    return Side(
        name=snapshot.name,
        tensors=tensors,
        values={fqn(path): node.value for path, node in walk(manifest.tree) if isinstance(node, ValueNode)},
        read=lambda name, box: snapshot.read(tensors[name].path, box),
        content=lambda name: _content(manifest, index[name]),
    )


def side_of_foreign(foreign: Foreign) -> Side:
    """Return another library's checkpoint as one side."""
    return Side(
        name=foreign.url,
        tensors=foreign.tensors(),
        values=foreign.values,
        read=functools.partial(_read, foreign),
    )


def _read(foreign: Foreign, name: str, box: Box) -> torch.Tensor:
    return foreign.read(name, box)


def _content(manifest: Manifest, tensor: int) -> bytes:
    """Return a digest of the boxes and digests of a tensor's chunks."""
    owner = manifest.resolve(tensor)
    record, rows = manifest.tensors[owner], manifest.chunks.rows(owner)
    offsets, sizes = manifest.chunks.boxes_of(record, rows)
    digests = manifest.chunks.digest[rows.start : rows.stop]
    return digest_parts((offsets.tobytes(), sizes.tobytes(), digests.tobytes()))
