"""A restore while it is being planned: what to fill, what to do afterwards, and everything that does not fit."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale_ckpt.adapters.taken import Taken
from vescale_ckpt.adapters.tensors import Held, hold
from vescale_ckpt.errors import InvalidInputError
from vescale_ckpt.state.dtypes import dtype_from_name, dtype_name
from vescale_ckpt.state.leaf import LeafKind, Piece, TensorLeaf
from vescale_ckpt.state.tree import Key, Node, Path, fqn, walk

if TYPE_CHECKING:
    from vescale_ckpt.adapters.options import Selector
    from vescale_ckpt.format.records import TensorRecord

Maker: TypeAlias = Callable[[], Any]
"""Makes a value once all bytes are in place."""

SameContent: TypeAlias = Callable[[Path, Path], bool]
"""Whether two stored tensors are equal to the last byte."""

_ARRAYS = frozenset({LeafKind.TENSOR.value, LeafKind.NUMPY.value})


class Phase(enum.IntEnum):
    """The order of what is done after the fill: objects that run code of their own come last."""

    VALUES = 0
    OPTIMIZERS = 1
    EXTRA_STATE = 2
    STATEFUL = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Who restores what whom saved."""

    rank: int | None
    """The one that restores; None: nobody in particular, who gets the values of all ranks."""
    world_size: int | None = None
    """Ranks that restore together; None: as many as saved."""
    saved_world_size: int | None = None
    """None: as many as there are entries of a per-rank value."""


class Draft:
    """What one rank will restore. Planning touches nothing of the caller's."""

    def __init__(
        self,
        stored: Node,
        tensors: Mapping[Path, TensorRecord],
        selector: Selector,
        *,
        ranks: Ranks,
        same_content: SameContent | None,
    ) -> None:
        self.ranks = ranks
        self.selector = selector
        self.leaves: list[TensorLeaf] = []
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.taken = Taken(stored)
        self.actions: list[tuple[Phase, Callable[[], None]]] = []
        self._stored = stored
        self._tensors = tensors
        self.paths: tuple[Path, ...] = tuple(tensors)
        """Of all stored tensors, in the order that ``alias_of`` counts in."""
        self._same_content = same_content
        self._filled: dict[Hashable, tuple[Path, str]] = {}  # memory -> (stored path, name in the target)
        self._absent: list[tuple[Hashable, str]] = []
        self._fresh: dict[Hashable, torch.Tensor] = {}
        self._alive: list[Any] = []  # identities are only good while the objects live
        self._by_name: dict[str, list[tuple[Path, Node]]] | None = None

    def later(self, phase: Phase, action: Callable[[], None]) -> None:
        """Do this when all bytes are in place."""
        self.actions.append((phase, action))

    def record(self, path: Path) -> TensorRecord:
        """Return the record of a stored tensor."""
        return self._tensors[path]

    def find_record(self, path: Path) -> TensorRecord | None:
        """Return the record of a stored path, None if no tensor is there."""
        return self._tensors.get(path)

    def root(self, path: Path) -> Path:
        """Return the path whose bytes this one shares: its own, or that of the tensor it is an alias of."""
        alias_of = self._tensors[path].alias_of
        return path if alias_of is None else self.paths[alias_of]

    def locate(self, below: Mapping[Key, Node], key: Key, stored: Path, target: Path) -> tuple[Path, Node] | None:
        """Return the stored (path, node) for a key of the target: its namesake, or what it is renamed to."""
        name = self.selector.renamed(fqn(target))
        if name is None:
            node = below.get(key)
            return None if node is None else ((*stored, key), node)
        found = self.named(name)
        if len(found) > 1:
            self.problems.append(
                f"'{fqn(target)}': renamed to '{name}', which {len(found)} places of the snapshot are called; "
                f"rename what is around it"
            )
        return found[0] if found else None

    def named(self, name: str) -> list[tuple[Path, Node]]:
        """Return every stored (path, node) of a dotted name."""
        if self._by_name is None:
            self._by_name = {}
            for path, node in walk(self._stored):
                self._by_name.setdefault(fqn(path), []).append((path, node))
        return self._by_name.get(name, [])

    def fill(self, value: Any, stored: Path, target: Path) -> None:
        """Plan to fill an array of the caller's from a stored tensor, or note why it does not fit."""
        self.taken.add(stored)
        name = fqn(target)
        try:
            held = hold(value, name)
        except InvalidInputError as error:
            self.problems.append(error.message)
            return
        reasons = [*self._mismatches(held, self.record(stored), name), *_unwritable(value, held, name)]
        self.problems.extend(reasons)
        if not reasons:
            self._add(value, held, stored, name)

    def allocate(
        self,
        stored: Path,
        target: Path,
        *,
        key: Hashable,
        make: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return new memory for a stored tensor, planned to be filled.

        Stored aliases of one tensor share it where they have the same ``key``, which says how it is made.
        """
        self.taken.add(stored)
        record = self.record(stored)
        shared = (self.root(stored), key)
        if shared not in self._fresh:
            self._fresh[shared] = make(record.shape, dtype or dtype_from_name(record.dtype))
        tensor, name = self._fresh[shared], fqn(target)
        try:
            self._add(tensor, hold(tensor, name), stored, name)
        except InvalidInputError as error:  # it is made like something of the caller's, which may have no memory
            self.problems.append(error.message)
        return tensor

    def absent(self, value: Any, target: Path) -> None:
        """Note that nothing is stored for an array of the target; a tie to one that is filled makes up for it."""
        name = fqn(target)
        try:
            self._absent.append((hold(value, name).identity, name))
        except InvalidInputError:
            self._absent.append((None, name))
        self._alive.append(value)

    def close(self) -> None:
        """Settle what could only be told at the end."""
        for identity, name in self._absent:
            filled = self._filled.get(identity) if identity is not None else None
            if filled is None:
                self.problems.append(missing(name, "a tensor"))
            else:
                self.notes.append(f"'{name}' is not stored; it is the same memory as '{filled[1]}', which is")
        self.notes.extend(self.selector.notes())

    def _add(self, value: Any, held: Held, stored: Path, name: str) -> None:
        self._alive.append(value)
        pieces: tuple[Piece, ...] = held.pieces
        alias_of = None
        if held.identity is not None:
            first, first_name = self._filled.setdefault(held.identity, (stored, name))
            if first_name != name:
                if not self._equal(first, stored):
                    self.problems.append(
                        f"'{name}': the target has it in the same memory as '{first_name}', the snapshot has two "
                        f"tensors that differ; untie them, or leave one out with ignore=({name!r},)"
                    )
                    return
                pieces, alias_of = (), first
        self.leaves.append(
            TensorLeaf(
                stored,
                held.dtype,
                held.global_shape,
                pieces,
                kind=held.kind,
                holding=held.holding,
                alias_of=alias_of,
            )
        )

    def _equal(self, one: Path, other: Path) -> bool:
        if self.root(one) == self.root(other):
            return True
        return self._same_content is not None and self._same_content(one, other)

    def _mismatches(self, held: Held, record: TensorRecord, name: str) -> list[str]:
        found: list[str] = []
        if record.kind not in _ARRAYS and record.kind != held.kind:
            found.append(f"'{name}': the target is {held.kind} data, the snapshot has {record.kind}; change the target")
        if held.global_shape != tuple(record.shape):
            found.append(
                f"'{name}': the target has shape {list(held.global_shape)}, the snapshot {list(record.shape)}; "
                f"make the target of that shape, or leave it out with ignore=({name!r},)"
            )
        dtype = dtype_name(held.dtype)
        if dtype != record.dtype:
            drops_imaginary = dtype_from_name(record.dtype).is_complex and not held.dtype.is_complex
            if self.selector.cast and not drops_imaginary:
                self.notes.append(f"'{name}': cast from {record.dtype} to {dtype}")
            else:
                way_out = "" if drops_imaginary else ", or allow the conversion with cast=True"
                found.append(
                    f"'{name}': the target has dtype {dtype}, the snapshot {record.dtype}; "
                    f"make the target of that dtype{way_out}"
                )
        return found


def missing(name: str, what: str) -> str:
    """Return the line for what the target has and the snapshot has not."""
    return (
        f"missing '{name}': the target has {what}, the snapshot has nothing of this name; "
        f"leave it as it is with ignore=({name!r},), or say what it is called there with rename"
    )


def _unwritable(value: Any, held: Held, name: str) -> list[str]:
    """Return why the caller's memory cannot be filled in place, as lines; none if it can."""
    with torch.no_grad():
        tensor = value.to_local() if isinstance(value, DTensor) else value
    if isinstance(tensor, torch.Tensor) and (tensor.is_conj() or tensor.is_neg()):
        return [f"'{name}': cannot fill a conjugated or negated view; pass what it is a view of"]
    if isinstance(tensor, np.ndarray) and (not tensor.flags.writeable or (tensor.size and held.identity is None)):
        return [f"'{name}': cannot fill a numpy array that is read-only or of strides that torch lacks; pass a copy"]
    if any(piece.view.is_inference() for piece in held.pieces):
        return [f"'{name}': cannot fill an inference tensor outside of inference mode; make it without"]
    if any(_may_overlap(piece.view) for piece in held.pieces):
        return [f"'{name}': cannot fill a tensor whose elements share memory (expanded); pass a contiguous one"]
    return []


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return whether two elements may be at one address; strides that interleave count as overlap."""
    reach = 0
    for stride, size in sorted((n, size) for n, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
