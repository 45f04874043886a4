"""A snapshot: one committed checkpoint, read without a process group and without a template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vescale_ckpt.adapters.fresh import fresh_state
from vescale_ckpt.errors import MismatchError
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.execute.verify import VerifyReport, verify_snapshot
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.selection import box_of
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.leaf import Piece
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.state.tree import Path
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a snapshot says of one tensor."""

    name: str
    """Dotted name."""
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    """``tensor``, ``numpy``, ``bytes`` or ``bytes_io``."""
    num_bytes: int
    num_chunks: int
    alias_of: str | None
    """The name of the tensor that this one is tied to."""


class Holder(Protocol):
    """What a snapshot needs of the store that holds it."""

    backend: Backend

    @property
    def reading(self) -> Backend:
        """Where packs are read from: ``backend``, behind a cache and beside a mirror if there are any."""

    @property
    def url(self) -> str:
        """Where the store is."""

    def manifest(self, ref: Ref) -> Manifest:
        """Return the manifest that a ref points to."""


class Snapshot:
    """One committed checkpoint; reading it needs no process group and no template."""

    def __init__(self, store: Holder, ref: Ref) -> None:
        self._store = store
        self.ref = ref
        self._options = ReadOptions()

    @property
    def name(self) -> str:
        """``run@step``."""
        return f"{self.ref.run}@{self.ref.step}"

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.ref.run

    @property
    def step(self) -> int:
        """Number of the step."""
        return self.ref.step

    @property
    def manifest(self) -> Manifest:
        """The whole description."""
        return self._store.manifest(self.ref)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the user gave to ``save(metadata=)``."""
        return self.manifest.metadata

    def tensors(self) -> dict[str, TensorInfo]:
        """Return name -> what is known of every tensor, without reading any."""
        manifest = self.manifest
        first = manifest.chunks.first
        found: dict[str, TensorInfo] = {}
        for i, record in enumerate(manifest.tensors):
            dtype = dtype_from_name(record.dtype)
            alias = None if record.alias_of is None else fqn(manifest.tensors[record.alias_of].path)
            volume = Box.whole(record.shape).volume
            info = TensorInfo(
                name=fqn(record.path),
                path=record.path,
                dtype=dtype,
                shape=record.shape,
                kind=record.kind,
                num_bytes=volume * dtype.itemsize,
                num_chunks=int(first[i + 1] - first[i]),
                alias_of=alias,
            )
            name = info.name if info.name not in found else repr(record.path)  # {"a.b": 1} beside {"a": {"b": 1}}
            found[name] = info
        return found

    def read(self, path: str | Path, box: Box | slice | tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return a box of a tensor as a new CPU tensor, reading only the chunks that it touches.

        Args:
            path: dotted name, or the tuple of keys.
            box: a ``Box``, slices of step 1 for the leading dims, or None for the whole tensor.

        Raises:
            NotFoundError: the snapshot has no such tensor.
            InvalidInputError: the box is outside the tensor.
            CorruptionError: stored bytes are damaged.
        """
        manifest = self.manifest
        index = manifest.find(path)
        record = manifest.tensors[index]
        wanted = box_of(box, record.shape, fqn(record.path))
        out = torch.empty(wanted.shape, dtype=dtype_from_name(record.dtype))
        needs = chunks_needed(manifest, [Want(index, wanted)])
        filler = Filler(manifest, [Piece(wanted, out)])
        Reader(self._store.reading, manifest, self._options).read(needs, filler.deliver)
        return out

    def state_dict(self) -> Any:
        """Return the whole state in this process: the saved nesting with CPU tensors; ties are one memory.

        Values that every rank had for itself come as a dict from rank to value.
        """
        manifest = self.manifest
        fresh = fresh_state(manifest.tree, {record.path: record for record in manifest.tensors})
        if fresh.problems:
            raise MismatchError(
                f"cannot make a state of {self.name}: {'; '.join(fresh.problems)}", problems=fresh.problems
            )
        pieces = [piece for leaf in fresh.leaves for piece in leaf.pieces]
        wants = [Want(manifest.find(leaf.path), piece.box) for leaf in fresh.leaves for piece in leaf.pieces]
        needs = chunks_needed(manifest, wants)
        Reader(self._store.reading, manifest, self._options).read(
            needs, Filler(manifest, pieces).deliver, range(len(manifest.packs))
        )
        fresh.finish()
        return fresh.state

    def verify(self, progress: Callable[[int], None] | None = None) -> VerifyReport:
        """Read everything and return what is wrong with it."""
        return verify_snapshot(self._store.backend, self.manifest, self._options, progress)

    def __repr__(self) -> str:
        return f"Snapshot({self.name!r} version {self.ref.version} in {self._store.url})"
