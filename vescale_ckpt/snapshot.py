"""A snapshot: one committed checkpoint, read without a process group and without a template."""

from __future__ import annotations

import importlib
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
from vescale_ckpt.stage.mapped import MappedMemory
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.leaf import Piece
from vescale_ckpt.state.tree import fqn

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vescale_ckpt.adapters.fresh import FreshState
    from vescale_ckpt.format.records import Manifest, TensorRecord
    from vescale_ckpt.plan.load_plan import ChunkNeed
    from vescale_ckpt.state.tree import Path
    from vescale_storage.backend import Backend
    from vescale_storage.refs import Ref


_BATCH_BYTES = 64 << 20
"""Of chunks, between two looks at how much of a file's memory this process holds."""


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
        return self._whole(fresh_state(self.manifest.tree, self._records()))

    def full_state_dict(self, folder: str | os.PathLike[str]) -> Any:
        """Return the whole state in this process, with its tensors in a file on disk: it may be larger than memory.

        As ``state_dict``, but tensors and arrays are views of one memory-mapped file, which is made in ``folder`` and
        is as large as the state. While it is filled, this process holds a few hundred MiB of it at most. The file stays
        for the caller to delete, at any time: tensors that are in use keep what they need.

        Args:
            folder: on a local disk; made if it is not there.

        Raises:
            MismatchError: a tensor subclass, which only a target can tell how to make.
            NoSpaceError: the disk has not so much room.
            CorruptionError: stored bytes are damaged.
            StorageError: the store or the folder failed.
        """
        manifest = self.manifest
        sizes = [_num_bytes(record) for record in manifest.tensors if record.alias_of is None]
        memory = MappedMemory(folder, sizes)
        try:
            fresh = fresh_state(manifest.tree, self._records(), empty=memory.empty)
            return self._whole(fresh, after_batch=memory.let_go)
        except BaseException:
            memory.path.unlink(missing_ok=True)
            raise

    def _records(self) -> dict[Path, TensorRecord]:
        return {record.path: record for record in self.manifest.tensors}

    def _whole(self, fresh: FreshState, after_batch: Callable[[], None] | None = None) -> Any:
        """Fill a state with everything and return it; in batches if something is to be done after each."""
        manifest = self.manifest
        if fresh.problems:
            raise MismatchError(
                f"cannot make a state of {self.name}: {'; '.join(fresh.problems)}", problems=fresh.problems
            )
        pieces = [piece for leaf in fresh.leaves for piece in leaf.pieces]
        wants = [Want(manifest.find(leaf.path), piece.box) for leaf in fresh.leaves for piece in leaf.pieces]
        needs = chunks_needed(manifest, wants)
        reader, filler = Reader(self._store.reading, manifest, self._options), Filler(manifest, pieces)
        unproved = set(range(len(manifest.packs)))
        for batch in _batches(needs, manifest) if after_batch else [needs]:
            packs = {int(manifest.chunks.pack[need.row]) for need in batch} if after_batch else unproved
            reader.read(batch, filler.deliver, sorted(unproved & packs))
            unproved -= packs
            if after_batch:
                after_batch()
        reader.read([], filler.deliver, sorted(unproved))
        fresh.finish()
        return fresh.state

    def to_zarr(self, *, extensions: bool = False) -> Any:
        """Return a read-only zarr v3 store over the snapshot, lazy: ``zarr.open_group(snap.to_zarr(), mode="r")``.

        What zarr-python lacks (bfloat16, 8-bit floats) is shown as unsigned integers of the same width with the
        attribute ``torch_dtype``; with ``extensions`` under the names that TensorStore reads.

        Raises:
            ConfigError: zarr is not installed.
        """
        return _interop("zarr.store").to_zarr(self, extensions=extensions)

    def tensorstore(self, path: str) -> Any:
        """Return one tensor, by its dotted name, as a lazy, read-only TensorStore.

        Raises:
            NotFoundError: there is none of this name.
            InvalidInputError: TensorStore has no such dtype.
            ConfigError: TensorStore is not installed.
        """
        return _interop("tensorstore.view").tensorstore(self, path)

    def verify(
        self,
        progress: Callable[[int], None] | None = None,
        *,
        sample: int | None = None,
        seed: int | None = None,
    ) -> VerifyReport:
        """Read everything, or a random sample of so many chunks, and return what is wrong with it."""
        return verify_snapshot(self._store.backend, self.manifest, self._options, progress, sample=sample, seed=seed)

    def __repr__(self) -> str:
        return f"Snapshot({self.name!r} version {self.ref.version} in {self._store.url})"


def _num_bytes(record: TensorRecord) -> int:
    return Box.whole(record.shape).volume * dtype_from_name(record.dtype).itemsize


def _batches(needs: Sequence[ChunkNeed], manifest: Manifest) -> Iterator[list[ChunkNeed]]:
    """Yield chunks in order, about ``_BATCH_BYTES`` of them at a time."""
    batch: list[ChunkNeed] = []
    size = 0
    for need in needs:
        batch.append(need)
        size += need.box.volume * dtype_from_name(manifest.tensors[need.tensor].dtype).itemsize
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _interop(module: str) -> Any:
    """Return a module of the floor above, which stands on this one and is here only for the convenience of a method."""
    return importlib.import_module(f"vescale_ckpt.interop.{module}")
