"""DCPWriter: ``torch.distributed.checkpoint.save`` and ``async_save`` write snapshots of the store.

torch plans who writes what and brings the ranks together; chunks, deduplication, packs, the proof of cover and the
create-only commit are the store's. No pickle is stored: plain values go into the state tree, and what is no plain value
is refused as a save of the store would refuse it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from vescale_ckpt.adapters.tensors import Held, hold, is_array
from vescale_ckpt.errors import InvalidInputError, StateError
from vescale_ckpt.execute.commit import Meeting, conclude, fragment_of
from vescale_ckpt.execute.dedup import DedupIndex
from vescale_ckpt.execute.write import WriteOptions, Writer
from vescale_ckpt.format.fragment import Fragment, decode_fragment, encode_fragment
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.geometry.box import Box
from vescale_ckpt.geometry.tiles import tile_shape
from vescale_ckpt.plan.holdings import Holdings, LeafSpec, decode_table
from vescale_ckpt.plan.parts import Part
from vescale_ckpt.plan.save_plan import merge_tables
from vescale_ckpt.saving.pools import make_pools
from vescale_ckpt.stage.raw import as_integers
from vescale_ckpt.stage.stager import StagedPart
from vescale_ckpt.state.build import build_tree
from vescale_ckpt.state.dtypes import dtype_name, item_bytes
from vescale_ckpt.state.leaf import Holding, LeafKind
from vescale_ckpt.state.tree import DictNode, ListNode, Node, Path, TensorNode, children
from vescale_storage import loop
from vescale_storage.keys import validate_run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

    from vescale_ckpt.store import Store
    from vescale_storage.refs import Ref

_TRANSACTION_BYTES = 16


class DCPWriter(StorageWriter):
    """Writes one snapshot ``run@step`` for ``torch.distributed.checkpoint.save(..., storage_writer=)``.

    A ``checkpoint_id`` given to torch is not used: the store, the run and the step say where. Make one for each save.
    """

    def __init__(self, store: Store, run: str, step: int, *, metadata: dict[str, Any] | None = None) -> None:
        super().__init__()
        if type(step) is not int or step < 0:
            raise InvalidInputError(f"cannot save step {step!r} of run '{run}': a step is an int of 0 or more")
        self._store = store
        self._run = validate_run(run)
        self._step = step
        self._metadata = dict(metadata or {})
        self._rank = 0
        self._is_coordinator = True
        self._began = time.monotonic()
        self.ref: Ref | None = None
        """Of the committed snapshot, on the coordinator."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        del checkpoint_id
        self._began = time.monotonic()
        self.ref = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn this rank's role; the coordinator makes the store where there is none."""
        del args
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0) or 0
        if is_coordinator:
            self._store.require(create=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return torch's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return torch's plans as they are: nothing that changes from save to save may be in them, they are cached."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; durable when the future is done, which it is on return."""
        self._store.require()
        names: dict[str, Path] = plan.planner_data or getattr(planner, "mappings", None) or {}
        collected = _Collected(plan.items, planner, names)
        marked = loop.run(self._store.marks.marked())  # before the newest snapshot is looked up
        newest = self._store.newest(self._run)
        index = DedupIndex([self._store.manifest(newest)] if newest is not None else [], marked)
        records = [_record(spec) for spec in collected.specs]
        pools = make_pools(None)
        writer = Writer(self._store.backend, records, index, pools.blocks, WriteOptions(), marked=marked)
        written = writer.write(collected.parts())
        fragment = fragment_of(self._rank, b"", written, collected.tree(), ())
        told = (encode_fragment(fragment), Holdings.of([(spec, []) for spec in collected.specs]).table_bytes())
        results = [
            WriteResult(index=item.index, size_in_bytes=collected.num_bytes(item), storage_data=None)
            for item in plan.items
        ]
        if results:
            first = results[0]
            results[0] = WriteResult(index=first.index, size_in_bytes=first.size_in_bytes, storage_data=told)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Prove and commit; the coordinator alone."""
        del metadata
        told = [r.storage_data for of_rank in results for r in of_rank if r.storage_data is not None]
        tables = [decode_table(table) for _, table in told]
        specs = merge_tables([([rank], table) for rank, table in enumerate(tables)])
        place = {spec.path: i for i, spec in enumerate(specs)}
        fragments = []
        for rank, ((content, _), table) in enumerate(zip(told, tables, strict=True)):
            fragment = decode_fragment(content)
            to_global = np.array([place[spec.path] for spec in table], dtype=np.uint32)
            fragments.append(_moved(fragment, rank, to_global))
        if not fragments:
            raise StateError(f"cannot commit {self._run}@{self._step}: no rank has written anything")
        meeting = Meeting(
            backend=self._store.backend,
            transaction=os.urandom(_TRANSACTION_BYTES).hex(),
            plan_key=b"",
            run=self._run,
            step=self._step,
            rank=0,
            world_size=len(results),
            deadline_seconds=1.0,
            began=self._began,
            marks=self._store.marks,
        )
        records = [_record(spec) for spec in specs]
        self.ref, manifest = conclude(meeting, records, fragments, self._metadata, shape_tree=_with_lists)
        self._store.keep(self.ref, manifest)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a snapshot is named by store, run and step, so torch must not pick this class by a path."""
        del checkpoint_id
        return False


class _Collected:
    """One rank's items as specs, parts and a tree."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner, names: dict[str, Path]) -> None:
        self._items = items
        self._planner = planner
        self._names = names
        self._values: dict[Path, Any] = {}
        self._arrays: dict[Path, Held] = {}
        """Numpy arrays and streams of bytes, which torch would pickle."""
        self._index: dict[Path, int] = {}
        self.specs: list[LeafSpec] = []
        for item in items:
            if item.type is not WriteItemType.BYTE_IO:
                self._add(item)
                continue
            path, value = self._path(item), self._object(item)
            if is_array(value):
                self._arrays[path] = held = hold(value, item.index.fqn)
                self._add_spec(path, held.dtype, held.global_shape, held.kind, Holding.REPLICATED)
            else:
                self._values[path] = value

    def parts(self) -> Iterator[StagedPart]:
        """Yield every tensor item, resolved as late as torch asks for."""
        for item in self._items:
            if item.type is WriteItemType.BYTE_IO:
                continue
            data = item.tensor_data
            assert data is not None  # noqa: S101 -- narrows the type: only bytes have none
            tensor = self._planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)  # noqa: S101 -- likewise
            view = tensor.detach().resolve_conj().resolve_neg().cpu()
            box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
            if box.volume:
                yield StagedPart(Part(self._index[self._path(item)], box, stored=True), as_integers(view), None)
        for path, held in self._arrays.items():
            for piece in held.pieces:
                yield StagedPart(Part(self._index[path], piece.box, stored=True), as_integers(piece.view), None)

    def tree(self) -> Node:
        """Return the tree of this rank's items; dicts that other ranks may add to."""
        root: dict[Any, Any] = {}
        for path in self._index:
            _put(root, path, TensorNode())
        for path, value in self._values.items():
            _put(root, path, build_tree(value, lambda _path, _value: None, path=path))
        return _nodes(root)

    def num_bytes(self, item: WriteItem) -> int:
        """Return an item's size."""
        if item.tensor_data is None:
            return 0
        data = item.tensor_data
        return Box.whole(tuple(data.chunk.sizes)).volume * data.properties.dtype.itemsize

    def _path(self, item: WriteItem) -> Path:
        return tuple(self._names.get(item.index.fqn, (item.index.fqn,)))

    def _object(self, item: WriteItem) -> Any:
        lookup = getattr(self._planner, "lookup_object", None)
        if lookup is None:
            raise InvalidInputError(
                f"cannot save '{item.index.fqn}': the planner {type(self._planner).__name__} gives pickled bytes "
                "only, and none are stored - use DefaultSavePlanner or one with lookup_object",
                fqn=item.index.fqn,
            )
        return lookup(item.index)

    def _add(self, item: WriteItem) -> None:
        data = item.tensor_data
        assert data is not None  # noqa: S101 -- narrows the type: only bytes have none
        self._add_spec(self._path(item), data.properties.dtype, tuple(data.size), LeafKind.TENSOR, Holding.SHARDED)

    def _add_spec(
        self, path: Path, dtype: torch.dtype, shape: tuple[int, ...], kind: LeafKind, holding: Holding
    ) -> None:
        name = dtype_name(dtype)
        spec = LeafSpec(path, name, item_bytes(name), shape, str(kind), str(holding))
        known = self._index.setdefault(path, len(self.specs))
        if known == len(self.specs):
            self.specs.append(spec)


def _record(spec: LeafSpec) -> TensorRecord:
    return TensorRecord(spec.path, spec.dtype, spec.shape, tile_shape(spec.shape, spec.item_bytes), spec.kind)


def _moved(fragment: Fragment, rank: int, to_global: np.ndarray[Any, np.dtype[np.uint32]]) -> Fragment:
    """Return a fragment whose chunks count tensors in the table of all ranks."""
    chunks = fragment.chunks
    columns = {name: getattr(chunks, name) for name in chunks.__slots__}
    columns["tensor"] = to_global[chunks.tensor] if len(chunks) else chunks.tensor
    return Fragment(
        rank=rank, plan_key=fragment.plan_key, tree=fragment.tree, chunks=type(chunks)(**columns), packs=fragment.packs
    )


def _put(root: dict[Any, Any], path: Path, node: Node) -> None:
    for key in path[:-1]:
        root = root.setdefault(key, {})
        if not isinstance(root, dict):
            raise InvalidInputError(f"cannot save {path}: '{key}' is a value and a container at once")
    if path[-1] in root:
        raise InvalidInputError(f"cannot save {path}: two items have this path")
    root[path[-1]] = node


def _nodes(tree: dict[Any, Any]) -> Node:
    items = tuple((key, _nodes(value) if isinstance(value, dict) else value) for key, value in tree.items())
    return DictNode(items, union=True)


def _with_lists(node: Node) -> Node:
    """Return the merged tree with the lists that torch's paths spell by their places."""
    if not isinstance(node, DictNode):
        return node
    items = tuple((key, _with_lists(child)) for key, child in children(node))
    keys = [key for key, _ in items]
    if keys and sorted(key for key in keys if isinstance(key, int)) == list(range(len(keys))):
        by_place = dict(items)
        return ListNode(tuple(by_place[i] for i in range(len(keys))))
    return DictNode(items, union=True)
