"""A snapshot under other names: what a key map makes of it, read lazily."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vescale_ckpt.errors import MismatchError
from vescale_ckpt.interop.foreign.snapshot import ForeignSnapshot, ForeignTensor
from vescale_ckpt.interop.keymap.plan import MappedTensor, plan_keymap
from vescale_ckpt.stage.raw import as_integers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vescale_ckpt.geometry.box import Box
    from vescale_ckpt.interop.keymap.rules import KeyMap
    from vescale_ckpt.state.tree import Key

_CONFIG_NAME = "config.json"
_MAX_CONFIG_BYTES = 16 << 20


class MappedSnapshot(ForeignSnapshot):
    """A snapshot seen through a key map.

    Args:
        inner: what is mapped; closing this closes it.
        keymap: how.

    Raises:
        MismatchError: the map does not fit the tensors; lists all.
    """

    format: ClassVar[str] = "mapped"

    def __init__(self, inner: ForeignSnapshot, keymap: KeyMap) -> None:
        super().__init__(inner.files)
        self._inner = inner
        self._keymap = keymap
        self._mapped: dict[str, MappedTensor] = plan_keymap(keymap, inner.tensors(), self._settings())
        self._tensors = {name: mapped.tensor for name, mapped in self._mapped.items()}
        self._overflowed: dict[str, int] = {}

    def _settings(self) -> dict[str, int]:
        config: Any = {}
        if _CONFIG_NAME in self._inner.carried():
            try:
                config = json.loads(self.files.read_all(_CONFIG_NAME, _MAX_CONFIG_BYTES))
            except (ValueError, RecursionError) as error:
                raise MismatchError(f"cannot map {self.url}: its {_CONFIG_NAME} is no JSON: {error!s:.100}") from error
        found: dict[str, int] = {}
        for name, keys in self._keymap.settings:
            values = [config.get(key) for key in keys] if isinstance(config, dict) else []
            number = next((value for value in values if type(value) is int), None)
            if number is not None:
                found[name] = number
        return found | dict(self._keymap.given)

    @property
    def url(self) -> str:
        """Where the inner one is."""
        return self._inner.url

    def tensors(self) -> Mapping[str, ForeignTensor]:
        """Return name -> what is known of every tensor, without reading any."""
        return self._tensors

    @property
    def values(self) -> Mapping[str, Any]:
        """Plain values, under their own names."""
        return self._inner.values

    @property
    def value_paths(self) -> Mapping[str, tuple[Key, ...]]:
        """Where plain values lie in the state."""
        return self._inner.value_paths

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the inner one says of itself."""
        return self._inner.metadata

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the inner one, and the casts."""
        casts = [
            f"{name}: cast from {mapped.stored} to {mapped.tensor.dtype}"
            for name, mapped in self._mapped.items()
            if mapped.stored != mapped.tensor.dtype
        ]
        return (*self._inner.notes, *casts)

    def carried(self) -> tuple[str, ...]:
        """Return what the inner one carries."""
        return self._inner.carried()

    def take_overflows(self) -> dict[str, int]:
        """Return, and forget, the overflows of casts since the last call."""
        found, self._overflowed = self._overflowed, {}
        return found

    def _fill(self, tensor: ForeignTensor, box: Box, out: torch.Tensor) -> None:
        mapped = self._mapped[tensor.name]
        is_cast = mapped.stored != tensor.dtype
        for piece in mapped.pieces:
            common = piece.box.intersect(box)
            if common is None:
                continue
            found = self._inner.read(piece.source, piece.source_box(common))
            found = found.t() if piece.transposed else found
            place = out[common.relative_to(box).slices]
            if is_cast:
                place.copy_(self._cast(found, tensor))
            else:
                as_integers(place).copy_(as_integers(found))

    def _cast(self, found: torch.Tensor, tensor: ForeignTensor) -> torch.Tensor:
        cast = found.to(tensor.dtype)
        if found.dtype.is_floating_point and tensor.dtype.is_floating_point:
            wide = cast.to(torch.float64)
            num_lost = int((~wide.isfinite() & found.to(torch.float64).isfinite()).sum())
            if num_lost:
                self._overflowed[tensor.name] = self._overflowed.get(tensor.name, 0) + num_lost
        return cast
