"""Initialisers that torch writes as loops over what was drawn; here of one draw an element, the same in any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from vescale_train.errors import InvalidInputError
from vescale_train.rng import draws
from vescale_train.rng.place import place_of_dtensor, place_of_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.rng.stream import Draw


def truncated_normal(next_draw: Callable[[], Draw]) -> Callable[..., Any]:
    """Return what ``trunc_normal_`` does; torch's draws again until no *local* number is out of bounds."""

    def fill(  # noqa: PLR0917 -- torch's signature
        tensor: torch.Tensor,
        mean: float,
        std: float,
        a: float,
        b: float,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if generator is not None:
            raise InvalidInputError("trunc_normal_ with a generator of its own: leave it out, the seed decides")
        if tensor.is_meta:
            return tensor
        with torch.no_grad():
            draw = next_draw()
            place = (
                place_of_dtensor(tensor, tensor.to_local(), "trunc_normal_")
                if isinstance(tensor, DTensor)
                else place_of_plain(tensor)
            )
            draws.truncated_normal(place.within(draw.cuts), draw.key, mean, std, (a, b))
        return tensor

    return fill
