"""DCPReader: ``torch.distributed.checkpoint.load`` reads snapshots of the store, exactly the bytes that it needs.

torch sees every stored tensor as one piece, so its plans ask for the boxes that a rank holds and no more; chunks are
found, verified and copied by the store. Nothing is unpickled from storage.
"""

from __future__ import annotations

import dataclasses
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

from vescale_ckpt.adapters.names import names_in
from vescale_ckpt.adapters.rebuild import is_group_params
from vescale_ckpt.errors import ConflictError, InternalError, MismatchError
from vescale_ckpt.execute.fill import Filler
from vescale_ckpt.execute.read import Reader, ReadOptions
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.plan.load_plan import Want, chunks_needed
from vescale_ckpt.state.build import restore_tree
from vescale_ckpt.state.dtypes import dtype_from_name
from vescale_ckpt.state.leaf import LeafKind, Piece
from vescale_ckpt.state.tree import DictNode, ListNode, Node, Path, TensorNode, TupleNode, children, fqn, get, walk
from vescale_storage.ref_records import SnapshotName, decode_ref, encode_ref

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator
    from typing import NoReturn

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from vescale_ckpt.execute.read import ReadCounters
    from vescale_ckpt.format.records import Manifest
    from vescale_ckpt.store import Store
    from vescale_storage.refs import Ref


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
        self._ref: Ref
        """Of what was opened."""
        self.counters: ReadCounters | None = None
        """What the last ``read_data`` cost this rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load."""
        del checkpoint_id
        self._opened = None

    def read_metadata(self) -> Metadata:
        """Return what the snapshot holds, in torch's words; the first call of a load.

        It takes no arguments: torch would ask a rank that failed once more, for metadata of its own, and then leave it
        out of the collectives that the others are in.
        """
        self._opened = None
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
        """Return torch's plans with the snapshot that the coordinator opened, which all are to read."""
        ref = self._ref
        return [dataclasses.replace(plan, storage_data=(ref.key, encode_ref(ref))) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for; done on return.

        Raises:
            MismatchError: a target has another dtype than what is stored, and ``cast`` is not set; nothing is filled.
            ConflictError: the ranks opened different snapshots, and these hold different tensors.
            CorruptionError: stored bytes are damaged.
        """
        self._follow(plan)
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
            self._ref = self._store.resolve(self._name)
            self._opened = self._store.manifest(self._ref)
        return self._opened

    def _follow(self, plan: LoadPlan) -> None:
        """Read from the snapshot that the coordinator opened, where a newer one came between its look and ours."""
        ours = self._manifest
        if plan.storage_data is None:  # a planner that makes plans of its own
            return
        key, content = plan.storage_data
        ref = decode_ref(content, key)
        if ref == self._ref:
            return
        theirs = self._store.manifest(ref)
        for item in plan.items:
            name = item.storage_index.fqn
            if _described(ours, name) != _described(theirs, name):
                raise ConflictError(
                    f"cannot load the newest snapshot of '{ref.run}': this rank opened step {self._ref.step}, the "
                    f"coordinator step {ref.step}, and '{name}' is not the same in both - name the step",
                    fqn=name,
                )
        self._ref, self._opened = ref, theirs

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
            value = _value(get(tree, values[name]), values[name]) if name in values else self._array(name)
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
    """Yield the paths of what torch takes for one value."""
    if isinstance(node, TensorNode):
        return
    if _is_one_value(node) or _is_params(node, path):
        yield path
        return
    for key, child in children(node):
        yield from _values(child, (*path, key))


def _is_params(node: Node, path: Path) -> bool:
    """Return whether this is the parameters of an optimizer's group, which a snapshot keeps by name."""
    return is_group_params(path) and isinstance(node, DictNode) and names_in(node) is not None


def _value(node: Node, path: Path) -> Any:
    """Return a value without tensors, as torch would have it."""
    if isinstance(node, DictNode) and _is_params(node, path):
        return list(names_in(node) or ())
    return restore_tree(node, _no, _no)


def _is_one_value(node: Node) -> bool:
    """Return whether torch takes a container as it is, or goes into it: into dicts, and lists that hold any or tensors.

    It goes into no tuple. One that holds tensors is gone into here: it can be no value that is made without them.
    """
    if isinstance(node, DictNode):
        return False
    if isinstance(node, ListNode):
        return all(not isinstance(child, TensorNode) and _is_one_value(child) for _, child in children(node))
    if isinstance(node, TupleNode):
        return not any(isinstance(below, TensorNode) for _, below in walk(node))
    return True


def _described(manifest: Manifest, name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype and shape of a tensor, or None for what is none."""
    found = manifest.by_fqn.get(name)
    return None if not found else (manifest.tensors[found[0]].dtype, manifest.tensors[found[0]].shape)


def _no(path: Path, *_: object) -> NoReturn:
    raise InternalError(f"a value without tensors has one at {path}")
