"""Loading a foreign checkpoint into a state of any layout, in place, without conversion.

The target is walked exactly as for a snapshot of a store, so whatever holds tensors there (modules under FSDP2 or
tensor parallelism, plain or sharded tensors) is filled here too. Every rank reads the boxes that it holds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch

from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import Restore, plan_restore, unexpected_keys
from vescale_ckpt.coordinate.group import default_group
from vescale_ckpt.errors import InvalidInputError, MismatchError
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.interop.foreign.snapshot import ForeignTensor
from vescale_ckpt.interop.safetensors.bands import bands
from vescale_ckpt.stage.raw import as_integers
from vescale_ckpt.state.build import build_tree
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.tree import Node, TensorNode, fqn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import torch.distributed as dist

    from vescale_ckpt.coordinate.group import Group
    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot
    from vescale_ckpt.state.leaf import Piece
    from vescale_ckpt.state.tree import Key, Path

_READ_BYTES: Final = 64 << 20


def load_foreign(  # noqa: PLR0913 - each says what the load may differ in
    snapshot: ForeignSnapshot,
    state: Any,
    *,
    under: str | None = None,
    cast: bool = False,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    process_group: dist.ProcessGroup | None = None,
    deadline_seconds: float = 1800.0,
) -> tuple[str, ...]:
    """Fill ``state`` in place, on all ranks, and return what the options allowed, one line each.

    Args:
        snapshot: what ``open_foreign`` returned, or a view of it through a key map.
        state: a dict of modules, tensors and values, as for ``Checkpointer.load``.
        under: the key below which the checkpoint's names are; by default ``model`` where the checkpoint has names
            without nesting (safetensors, npz), and nothing where it has the nesting that was saved.
        cast: fill tensors of another dtype.
        only: load what has one of these names, and leave the rest of the target.
        ignore: leave these as they are.
        rename: name in the target -> name in the checkpoint.
        process_group: the ranks; None means all, or this process alone.
        deadline_seconds: of one collective.

    Raises:
        MismatchError: state and checkpoint do not fit; lists all of it, nothing was changed.
        CorruptionError, StorageError: the checkpoint is damaged or cannot be read.
    """
    options = RestoreOptions(cast=cast, only=tuple(only), ignore=tuple(ignore), rename=dict(rename or {}))
    group = default_group(process_group, deadline_seconds)
    phase = f"loading {snapshot.url}"
    try:
        tree, names, records = group.attempt(phase, lambda: _described(snapshot, under))

        def plan() -> Restore:
            return plan_restore(
                state,
                tree,
                records,
                rank=group.rank,
                world_size=group.world_size,
                options=options,
                saved_world_size=1,
                same_content=lambda a, b: _same(snapshot, names[a], names[b]),
            )

        restore = group.attempt(phase, plan)
        _refuse(snapshot, group, [*restore.problems, *_unexpected(group, tree, restore, options)])
        group.attempt(phase, lambda: _fill(snapshot, restore, names))
        group.attempt(phase, restore.finish)
    finally:
        group.close()
    return restore.notes


def _described(snapshot: ForeignSnapshot, under: str | None) -> tuple[Node, dict[Path, str], dict[Path, TensorRecord]]:
    """Return the state tree of a checkpoint, the names of its tensors by path, and their records."""
    tensors = snapshot.tensors()
    is_nested = any(tensor.path for tensor in tensors.values())
    prefix: Path = (under,) if under else () if under is not None or is_nested else ("model",)
    names = {(*prefix, *(tensor.path or (name,))): name for name, tensor in tensors.items()}
    if len(names) != len(tensors):
        raise InvalidInputError(f"cannot load {snapshot.url}: two tensors have one place in its state")
    state: dict[Key, Any] = {}
    for path, name in names.items():
        _put(state, path, tensors[name])
    for name, value in snapshot.values.items():
        _put(state, (*prefix, *snapshot.value_paths.get(name, (name,))), value)
    tree = build_tree(state, lambda _, value: TensorNode() if isinstance(value, ForeignTensor) else None)
    places = {name: place for place, name in enumerate(names.values())}
    records = {
        path: TensorRecord(
            path=path,
            dtype=dtype_name(tensors[name].dtype),
            shape=tensors[name].shape,
            tile=tuple(max(1, size) for size in tensors[name].shape),
            alias_of=None if (owner := tensors[name].alias_of) is None else places[owner],
        )
        for path, name in names.items()
    }
    return tree, names, records


def _put(state: dict[Key, Any], path: Path, value: Any) -> None:
    at = state
    for key in path[:-1]:
        at = at.setdefault(key, {})
        if not isinstance(at, dict):
            raise InvalidInputError(f"cannot nest {fqn(path)!r}: {key!r} is a value already")
    at[path[-1]] = value


def _same(snapshot: ForeignSnapshot, a: str, b: str) -> bool:
    """Return whether two tensors of a checkpoint hold the same bits."""
    tensors = snapshot.tensors()
    one, other = tensors[a], tensors[b]
    if (one.alias_of or a) == (other.alias_of or b):
        return True
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return all(
        torch.equal(as_integers(snapshot.read(a, box)), as_integers(snapshot.read(b, box)))
        for box in _bands(one.shape, one.dtype)
    )


def _bands(shape: tuple[int, ...], dtype: torch.dtype) -> list[Box]:
    return list(bands(shape, tuple(max(1, size) for size in shape), dtype.itemsize, _READ_BYTES))


def _unexpected(group: Group, tree: Node, restore: Restore, options: RestoreOptions) -> tuple[str, ...]:
    """Return what is stored and has no place on any rank; one rank alone has told it among its problems."""
    if group.world_size == 1:
        return ()
    sent = group.all_gather_fixed(restore.taken.tobytes())
    taken: np.ndarray[Any, Any] = restore.taken.copy()
    for data in sent:
        taken |= torch.frombuffer(bytearray(data), dtype=torch.bool).numpy() if data else False
    return unexpected_keys(tree, taken, options)


def _refuse(snapshot: ForeignSnapshot, group: Group, problems: Sequence[str]) -> None:
    """Raise every rank's problems on all ranks."""
    lines: dict[str, None] = {}
    for data in group.all_gather(json.dumps(list(problems)).encode()):
        lines |= dict.fromkeys(json.loads(data))
    if lines:
        shown = "\n  ".join(list(lines)[:50]) + (f"\n  ... and {len(lines) - 50} more" if len(lines) > 50 else "")
        raise MismatchError(
            f"cannot load {snapshot.url} into this state, {len(lines)} problems; nothing was changed:\n  {shown}",
            problems=tuple(lines),
        )


def _fill(snapshot: ForeignSnapshot, restore: Restore, names: Mapping[Path, str]) -> None:
    for leaf in restore.leaves:
        for piece in leaf.pieces:
            _fill_piece(snapshot, names[leaf.path], piece)


def _fill_piece(snapshot: ForeignSnapshot, name: str, piece: Piece) -> None:
    for band in _bands(piece.box.shape, piece.view.dtype):
        found = snapshot.read(name, band.shifted(piece.box.offset))
        place = piece.view.detach()[band.slices] if band.shape else piece.view.detach()
        if found.dtype == place.dtype:
            as_integers(place).copy_(as_integers(found))
        else:
            place.copy_(found)
