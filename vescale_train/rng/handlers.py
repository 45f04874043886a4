"""What is called for random operations on DTensors while the switch is on: each rank draws the numbers of its shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vescale_train.errors import InvalidInputError
from vescale_train.rng import draws
from vescale_train.rng.kernels import IN_PLACE, PLAIN_ONLY, REFUSED, bernoulli, dropped_out, named, refused
from vescale_train.rng.place import Place, place_of_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.rng.kernels import NextDraw, Write

aten = torch.ops.aten

LIKE: dict[Any, Any] = {
    aten.rand_like.default: aten.uniform_.default,
    aten.randn_like.default: aten.normal_.default,
    aten.randint_like.default: aten.random_.to,
    aten.randint_like.low_dtype: getattr(aten.random_, "from"),
}
"""Operations of DTensors that make a tensor like their first argument, and what fills it."""


class Handlers:
    """The handlers, each called with (operation, args, kwargs)."""

    def __init__(self, next_draw: NextDraw) -> None:
        self._next_draw = next_draw

    def table(self) -> dict[Any, Callable[..., Any]]:
        """Return the handler for each operation."""
        refusing = dict.fromkeys((*REFUSED, *PLAIN_ONLY), self.refuse)
        writing = dict.fromkeys(IN_PLACE, self.in_place) | dict.fromkeys(LIKE, self.like)
        return (
            refusing
            | writing
            | {
                aten.bernoulli.default: self.bernoulli_of,
                aten.bernoulli.p: self.bernoulli,
                aten.native_dropout.default: self.native_dropout,
            }
        )

    def in_place(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Write to the first argument."""
        _refuse_generator(op, kwargs)
        return self._write(args[0], IN_PLACE[op], args[1:], kwargs)

    def like(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor laid out as the first argument."""
        _refuse_generator(op, kwargs)
        out = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
        return self._write(out, IN_PLACE[LIKE[op]], args[1:], {})

    def bernoulli(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make ones and zeros with one probability."""
        _refuse_generator(op, kwargs)
        return self._write(torch.empty_like(args[0]), bernoulli, args[1:], {})

    def bernoulli_of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make ones and zeros with the probabilities of the first argument."""
        _refuse_generator(op, kwargs)
        out, draw = torch.empty_like(args[0]), self._next_draw()
        probabilities = [piece.memory for piece in _place(args[0]).pieces]
        draws.bernoulli_of(_place(out).within(draw.cuts), draw.key, probabilities)
        return out

    def native_dropout(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002 -- a handler's
        """Drop out; return the mask too."""
        tensor, p, train = args
        mask = torch.ones_like(tensor, dtype=torch.bool)
        if train is False:
            return tensor.clone(), mask
        self._write(mask, bernoulli, (1 - p,), {})
        return dropped_out(tensor, mask, p), mask

    def refuse(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002 -- a handler's
        """Refuse what draws in a way that no index addresses."""
        raise refused(op, "a DTensor")

    def _write(self, tensor: torch.Tensor, write: Write, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        place, draw = _place(tensor), self._next_draw()
        write(place.within(draw.cuts), draw.key, tensor.dtype, *rest, **named(kwargs))
        return tensor


def _place(tensor: Any) -> Place:
    with torch.no_grad():
        return place_of_dtensor(tensor, tensor.to_local(), f"a DTensor of shape {tuple(tensor.shape)}")


def _refuse_generator(op: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.get("generator") is not None:
        raise InvalidInputError(
            f"{op} of a DTensor with a generator of its own would draw the same numbers on every shard: leave the "
            f"generator out, and single_device_rng's seed decides"
        )
