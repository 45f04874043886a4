"""DCPReader: ``torch.distributed.checkpoint.load`` reads snapshots of the store, exactly the bytes that it needs.

torch sees every stored tensor as one piece, so its plans ask for the boxes that a rank holds and no more; chunks are
found, verified and copied by the store. Nothing is unpickled from storage.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from vescale_ckpt.errors import InternalError, MismatchError
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.state.build import restore_tree
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.leaf import LeafKind, Piece
from vescale_ckpt.state.tree import DictNode, ListNode, Node, Path, TensorNode, TupleNode, children, fqn, get, walk
from vescale_storage.ref_records import SnapshotName

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from typing import NoReturn

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from vescale_ckpt.execute.read import ReadCounters
    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.store import Store


class DCPReader(StorageReader):
    """Reads one snapshot for ``torch.distributed.checkpoint.load(..., storage_reader=)``.

    Args:
        store: where it lies.
        run: its run.
        step: its step; None for the newest.
        cast: allow a target of another dtype than the stored one, which torch would fill without a word.
    """

    def __init__(self, store: Store, run: str, step: int | None = None, *, cast: bool = False) -> None:
        super().__init__()
        self._store = store
        self._name = SnapshotName(run, step)
        self._cast = cast
        self._opened: Manifest | None = None
        self.counters: ReadCounters | None = None
        """What the last ``read_data`` cost this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        del checkpoint_id
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the snapshot holds, in torch's words."""
        del args, kwargs
        manifest = self._manifest
        entries: dict[str, Any] = {}
        paths: dict[str, Any] = {}
        for record in manifest.tensors:
            name = fqn(record.path)
            paths[name] = record.path
            if record.kind != LeafKind.TENSOR:
                entries[name] = BytesStorageMetadata()
                continue
            size = torch.Size(record.shape)
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=dtype_from_name(record.dtype))
            entries[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[whole])
        for path in _values(manifest.tree):
            entries[fqn(path)] = BytesStorageMetadata()
            paths[fqn(path)] = path
        return Metadata(state_dict_metadata=entries, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take notice of nothing: every rank opens the snapshot by itself."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return torch's plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for; done on return.

        Raises:
            MismatchError: a target has another dtype than what is stored, and ``cast`` is not set; nothing is filled.
            CorruptionError: stored bytes are damaged.
        """
        manifest = self._manifest
        tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        targets = [planner.resolve_tensor(item) for item in tensors]
        places = [manifest.find(item.storage_index.fqn) for item in tensors]
        self._refuse_casts(tensors, targets, places)
        boxes = [Box(tuple(item.storage_offsets), tuple(item.lengths)) for item in tensors]
        pieces = [Piece(box, target.detach()) for box, target in zip(boxes, targets, strict=True)]
        needs = chunks_needed(manifest, [Want(place, box) for place, box in zip(places, boxes, strict=True)])
        reader = Reader(self._store.reading, manifest, ReadOptions())
        reader.read(needs, Filler(manifest, pieces).deliver)
        self.counters = reader.counters
        for item, target in zip(tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        self._load_values([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a snapshot is named by store, run and step, so torch must not pick this class by a path."""
        del checkpoint_id
        return False

    @property
    def _manifest(self) -> Manifest:
        if self._opened is None:
            self._opened = self._store.manifest(self._store.resolve(self._name))
        return self._opened

    def _refuse_casts(self, items: list[ReadItem], targets: list[torch.Tensor], places: list[int]) -> None:
        problems = []
        for item, target, place in zip(items, targets, places, strict=True):
            stored = dtype_from_name(self._manifest.tensors[place].dtype)
            if stored != target.dtype and not self._cast:
                problems.append(f"'{item.dest_index.fqn}': stored {stored}, target {target.dtype}")
        if problems:
            raise MismatchError(
                f"cannot load {self._manifest.run}@{self._manifest.step}: {len(problems)} dtypes differ - "
                + "; ".join(problems[:20])
                + " - pass DCPReader(cast=True) to convert",
                problems=tuple(problems),
            )

    def _load_values(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Hand plain values over as torch wants them: as the bytes of a torch.save that is made here and now."""
        tree = self._manifest.tree
        values = {fqn(path): path for path in _values(tree)}
        for item in items:
            name = item.storage_index.fqn
            value = restore_tree(get(tree, values[name]), _no, _no) if name in values else self._array(name)
            stream = io.BytesIO()
            torch.save(value, stream)
            stream.seek(0)
            planner.load_bytes(item, stream)

    def _array(self, name: str) -> Any:
        manifest = self._manifest
        place = manifest.find(name)
        record = manifest.tensors[place]
        whole = Box.whole(record.shape)
        out = torch.empty(record.shape, dtype=dtype_from_name(record.dtype))
        needs = chunks_needed(manifest, [Want(place, whole)])
        Reader(self._store.reading, manifest, ReadOptions()).read(needs, Filler(manifest, [Piece(whole, out)]).deliver)
        if record.kind == LeafKind.NUMPY:
            return out.numpy()
        data = out.numpy().tobytes()
        return io.BytesIO(data) if record.kind == LeafKind.BYTES_IO else data


def _values(node: Node, path: Path = ()) -> Iterator[Path]:
    """Yield the paths of what torch takes for one value: lists and tuples without tensors are one, dicts never are."""
    if isinstance(node, TensorNode):
        return
    sequence = isinstance(node, ListNode | TupleNode)
    if isinstance(node, DictNode) or (sequence and any(isinstance(below, TensorNode) for _, below in walk(node))):
        for key, child in children(node):
            yield from _values(child, (*path, key))
    else:
        yield path


def _no(path: Path, *_: object) -> NoReturn:
    raise InternalError(f"a value without tensors has one at {path}")
