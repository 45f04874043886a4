"""The record of a model's making: every operation on tensors, noted instead of done.

Tensors are of the meta device meanwhile and hold nothing. What an operation reads and writes is noted by memory (the
storage that a tensor is a view of), so views, slices and tied weights need no care of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vescale_train.errors import StateError
from vescale_train.torch_private import (
    TorchDispatchMode,
    fill_truncated_normal,
    is_mutating,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a memory."""

    memory: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its leaves are values, constants, and ``View`` where a tensor of the record stood."""

    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    """Of (args, kwargs)."""
    outputs: tuple[View, ...]

    @property
    def inputs(self) -> tuple[View, ...]:
        """The views that it is given."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, View))

    @property
    def memories(self) -> frozenset[int]:
        """What it reads or writes."""
        return frozenset(view.memory for view in (*self.inputs, *self.outputs))


@dataclass(slots=True)
class Record:
    """All operations of a making, in order, and the memories that they speak of."""

    operations: list[Operation] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Memory -> bytes."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Kept, so that no two memories of the record are ever at one address; they hold nothing."""
    number_of: dict[int, int] = field(default_factory=dict)

    def view_of(self, tensor: torch.Tensor) -> View:
        """Return a meta tensor as a view; its memory is noted when it is new."""
        storage = tensor.untyped_storage()
        number = self.number_of.setdefault(storage._cdata, len(self.storages))  # noqa: SLF001 - a storage's identity
        if number == len(self.storages):
            self.storages.append(storage)
            self.sizes.append(storage.nbytes())
        return View(number, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor's memory is one of the record's."""
        return tensor.is_meta and tensor.untyped_storage()._cdata in self.number_of  # noqa: SLF001


class Recording(TorchDispatchMode):
    """While it is on, new tensors are meta tensors, and what is done to them is noted in ``record``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an operation, and do it on meta tensors for its shapes; constants are computed as ever."""
        kwargs = dict(kwargs or {})
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        makes = not tensors and _takes_device(func)
        if not makes and not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        shown = [leaf.to("meta") if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf for leaf in leaves]
        meta_args, meta_kwargs = tree_unflatten(shown, structure)
        if makes or meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        noted = tuple(self._noted(leaf) for leaf in leaves)
        try:
            result = func(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise StateError(
                f"cannot defer the making of this model: {func} needs values, which are not there yet ({error}); make "
                f"the model itself, or without that operation"
            ) from error
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if is_mutating(func) or not all(self.record.knows(tensor) for tensor in outputs):
            views = tuple(self.record.view_of(tensor) for tensor in outputs)
            self.record.operations.append(Operation(func, noted, structure, views))
        return result

    def truncated_normal(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Note torch's truncated normal distribution, which passes meta tensors by without an operation."""
        leaves, structure = tree_flatten(((tensor, *args), kwargs))
        noted = tuple(self._noted(leaf) for leaf in leaves)
        self.record.operations.append(Operation(fill_truncated_normal, noted, structure, noted[:1]))
        return tensor

    def _noted(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return self.record.view_of(leaf) if leaf.is_meta else leaf.detach().clone()


def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)  # noqa: SLF001 - an operator's schema
