"""A store of thirty lines: whole tensors in a dict, filled and read by the boxes of pieces."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vescale_ckpt.adapters.capture import Captured, capture
from vescale_ckpt.adapters.options import RestoreOptions
from vescale_ckpt.adapters.restore import Restore, plan_restore
from vescale_ckpt.format.records import TensorRecord
from vescale_ckpt.state.dtypes import dtype_name
from vescale_ckpt.state.merge import merge_trees

if TYPE_CHECKING:
    from vescale_ckpt.state.tree import Node, Path


@dataclass
class Stored:
    tree: Node
    tensors: dict[Path, TensorRecord]
    full: dict[Path, torch.Tensor]
    copies: dict[Path, torch.Tensor]
    """How often each element was held."""


def store(captured: dict[int, Captured]) -> Stored:
    """Return what all ranks captured, as whole tensors."""
    tree = merge_trees([(rank, one.tree) for rank, one in captured.items()])
    leaves: dict[Path, list] = {}
    for one in captured.values():
        for leaf in one.leaves:
            leaves.setdefault(leaf.path, []).append(leaf)
    index = {path: i for i, path in enumerate(leaves)}
    tensors, full, copies = {}, {}, {}
    for path, held in leaves.items():
        first = held[0]
        aliases = {leaf.alias_of for leaf in held if leaf.alias_of is not None}
        assert len(aliases) <= 1
        assert len({(leaf.dtype, leaf.global_shape, leaf.kind, leaf.holding) for leaf in held}) == 1, held
        tensors[path] = TensorRecord(
            path,
            dtype_name(first.dtype),
            first.global_shape,
            first.global_shape,
            first.kind.value,
            index[aliases.pop()] if aliases else None,
        )
        full[path] = torch.zeros(first.global_shape, dtype=first.dtype)
        copies[path] = torch.zeros(first.global_shape, dtype=torch.int32)
        for leaf in held:
            for piece in leaf.pieces:
                at = piece.box.slices or ...
                seen = copies[path][at] > 0
                assert same_bits(full[path][at][seen], piece.view[seen]), f"{path}: copies differ"
                full[path][at] = piece.view
                copies[path][at] += 1
    return Stored(tree, tensors, full, copies)


def save(state, *, rank: int = 0) -> Stored:
    """Return the state of one process, stored."""
    return store({rank: capture(state, rank=rank)})


def fill(restore: Restore, stored: Stored) -> None:
    """Put the bytes in place and finish."""
    paths = tuple(stored.tensors)
    assert not restore.problems, "\n".join(restore.problems)
    for leaf in restore.leaves:
        record = stored.tensors[leaf.path]
        full = stored.full[leaf.path if record.alias_of is None else paths[record.alias_of]]
        with torch.no_grad():
            for piece in leaf.pieces:
                piece.view.copy_(full[piece.box.slices or ...])
    restore.finish()


def load(stored: Stored, state, *, rank: int = 0, world_size: int = 1, **more) -> Restore:
    """Fill a state from what is stored."""
    restore = plan(stored, state, rank=rank, world_size=world_size, **more)
    fill(restore, stored)
    return restore


def plan(stored: Stored, state, *, rank: int = 0, world_size: int = 1, **more) -> Restore:
    """Plan a load."""
    return plan_restore(state, stored.tree, stored.tensors, rank=rank, world_size=world_size, **more)


def problems(stored: Stored, state, **more) -> tuple[str, ...]:
    """Return what a load says is wrong; options may be given by their names."""
    options = RestoreOptions(**{key: more.pop(key) for key in ("cast", "only", "ignore", "rename") if key in more})
    return plan(stored, state, options=options, **more).problems


def same_optimizers(one, other) -> None:
    """Assert that two optimizers have the same groups and state, to the bit and to the type."""
    a, b = one.state_dict(), other.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            twin = b["state"][key][name]
            assert type(value) is type(twin), name
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.device) == (twin.dtype, twin.device), name
                assert torch.equal(value, twin), name
    assert a["param_groups"] == b["param_groups"]


def leaves(state, path=()):
    """Yield (path, value) of everything that is no container."""
    if isinstance(state, dict | list | tuple) and not isinstance(state, torch.Size):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, (*path, key))
    else:
        yield path, state


def same_states(one, other) -> None:
    """Assert that two nested states are the same, to the bit and to the type."""
    for (path, a), (twin, b) in zip(leaves(one), leaves(other), strict=True):
        assert path == twin
        assert type(a) is type(b), path
        if isinstance(a, torch.Tensor):
            assert same_bits(a, b), path
        elif isinstance(a, np.ndarray):
            assert np.array_equal(a, b), path
        elif isinstance(a, io.BytesIO):
            assert a.getvalue() == b.getvalue(), path
        else:
            assert a == b, path


def same_bits(a, b) -> bool:
    """Return whether two tensors are the same byte for byte, whatever their strides."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(x, y)
