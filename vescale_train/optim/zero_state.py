"""The state of a sharded optimizer under the parameters that the user knows, as places in the whole ones.

A checkpoint asks an optimizer for the state of its parameters and writes it back; with this mapping it needs to know
nothing about shards, and what it stores is what a plain optimizer's state is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from vescale_ckpt.state.sharded_view import ShardedView
from vescale_train.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.optim.shards import ParameterBucket, Shard

MASTER = "master"
"""Key of the float32 copy of a parameter of less precision; a plain optimizer passes it by."""


class ShardedState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """Whole parameter -> its state, with a ``ShardedView`` for whatever has an element for each of its elements.

    Args:
        optimizer: the plain one, whose parameters are the shards.
        buckets: all shards.
        settle: called before anything is read; parameters may be under way to this rank still.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, buckets: tuple[ParameterBucket, ...], settle: Callable[[], None]
    ) -> None:
        self._state: dict[Any, Any] = optimizer.state
        self._places = {id(shard.parameter): (bucket, shard) for bucket in buckets for shard in bucket.shards}
        self._settle = settle
        self._stepped: set[int] = set()  # parameters that have been updated; the same on all ranks

    def mark_stepped(self, parameters: set[int]) -> None:
        """Note that these parameters, by id, are updated."""
        self._stepped |= parameters

    def new_state(self, parameter: torch.Tensor, dtype: torch.dtype) -> ShardedView:
        """Return fresh memory for one value of a parameter's state, to be filled and then set.

        Raises:
            KeyError: the parameter is not one of this optimizer's.
        """
        _, shard = self._places[id(parameter)]
        return shard.view(torch.empty(shard.flat.numel(), dtype=dtype, device=shard.flat.device))

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        self._settle()
        if id(parameter) not in self._stepped:
            raise KeyError(parameter)
        bucket, shard = self._places[id(parameter)]
        found: dict[str, Any] = self._state.get(shard.flat) or {}
        shown = {key: shard.view(value) if _is_like(value, shard) else value for key, value in found.items()}
        if bucket.has_master:
            shown[MASTER] = shard.view(shard.flat.detach())
        return shown

    def __setitem__(self, parameter: torch.Tensor, values: Mapping[str, Any]) -> None:
        bucket, shard = self._places[id(parameter)]
        self._stepped.add(id(parameter))
        made = {key: _taken(key, value, shard) for key, value in values.items()}
        master = made.pop(MASTER, None)
        if master is not None:
            bucket.write(shard, master)
        if shard.flat.numel():
            self._state[shard.flat] = made

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._stepped:
            raise KeyError(parameter)
        self._stepped.remove(id(parameter))
        self._state.pop(self._places[id(parameter)][1].flat, None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (shard.parameter for _, shard in self._places.values() if id(shard.parameter) in self._stepped)

    def __len__(self) -> int:
        return len(self._stepped)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._stepped


def _is_like(value: Any, shard: Shard) -> bool:
    """Return whether a value has one element for each element of a shard."""
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.shape == shard.flat.shape


def _taken(key: str, value: Any, shard: Shard) -> Any:
    """Return a value of a whole parameter's state as the plain optimizer is to hold it for a shard."""
    shape = tuple(shard.parameter.shape)
    if isinstance(value, ShardedView):
        made = torch.empty(shard.flat.numel(), dtype=value.dtype, device=shard.flat.device)
        _copy(shard.view(made), value, key)
        return made
    if not isinstance(value, torch.Tensor):
        return value
    is_whole = tuple(value.shape) == shape and key != "step"
    return shard.cut(value) if is_whole else value.clone()  # a step counts in place


def _copy(target: ShardedView, source: ShardedView, key: str) -> None:
    if target.boxes != source.boxes or target.global_shape != source.global_shape:
        raise InvalidInputError(
            f"cannot take '{key}': it is held in the boxes {source.boxes} of shape {source.global_shape}, the shard "
            f"of this rank is {target.boxes} of {target.global_shape}; load it through a checkpoint, which cuts anew"
        )
    for (_, mine), (_, theirs) in zip(target.pieces, source.pieces, strict=True):
        mine.copy_(theirs)
