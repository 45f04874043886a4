"""The kernels of random operations on plain tensors.

They replace torch's own while the switch is on and cost nothing to any other operation. Composite operations
(``randn``, ``dropout``, the parts of ``scaled_dot_product_attention``) come down to these.
An operation whose numbers would not be those of one device is refused; one with a generator of its own is left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vescale_train.errors import InvalidInputError
from vescale_train.rng import draws
from vescale_train.rng.place import Place, place_of_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from vescale_train.rng.philox import Key
    from vescale_train.rng.stream import Draw

    NextDraw = Callable[[], Draw]
    Write = Callable[..., None]

aten = torch.ops.aten


def _random_to(place: Place, key: Key, dtype: torch.dtype, high: int) -> None:
    draws.integers(place, key, dtype, 0, high)


def bernoulli(place: Place, key: Key, dtype: torch.dtype, probability: float = 0.5) -> None:  # noqa: ARG001 -- as all
    """Write as ``draws.bernoulli``, called as the others are."""
    draws.bernoulli(place, key, probability)


IN_PLACE: dict[Any, Write] = {
    aten.uniform_.default: draws.uniform,
    aten.normal_.default: draws.normal,
    aten.bernoulli_.float: bernoulli,
    aten.exponential_.default: draws.exponential,
    aten.random_.default: draws.integers,
    getattr(aten.random_, "from"): draws.integers,
    aten.random_.to: _random_to,
}
"""Operations that write to their first argument; called with place, key, dtype and the operation's other arguments."""

REFUSED = (
    aten.geometric_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.poisson.default,
    aten.binomial.default,
    aten.multinomial.default,
    aten._standard_gamma.default,  # noqa: SLF001 -- operations have such names
    aten._sample_dirichlet.default,  # noqa: SLF001
    aten.rrelu_with_noise.default,
    aten.rrelu_with_noise_.default,
    aten.bernoulli.out,
)
"""Operations with kernels of their own that draw in ways that no index addresses."""

PLAIN_ONLY = (
    aten.randperm.generator_out,
    aten.bernoulli_.Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
)


def plain_kernels(next_draw: NextDraw) -> dict[Any, Callable[..., Any]]:
    """Return a kernel for plain tensors for each operation, by operation."""
    kernels: dict[Any, Callable[..., Any]] = {op: _in_place(write, next_draw) for op, write in IN_PLACE.items()}
    kernels |= {op: _refusal(op) for op in REFUSED}

    def bernoulli_of(tensor: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        draw = next_draw()
        place = place_of_plain(tensor)
        draws.bernoulli_of(place.within(draw.cuts), draw.key, [p.expand_as(tensor)])
        return tensor

    def randperm(n: int, *, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(n).copy_(draws.permutation(next_draw().key, n, out.device))

    def normal_of(mean: Any, std: Any = 1.0) -> torch.Tensor:
        parts = [x for x in (mean, std) if isinstance(x, torch.Tensor)]
        out = torch.empty_like(parts[0] + 0 * parts[-1], memory_format=torch.contiguous_format)
        draw = next_draw()
        draws.normal(place_of_plain(out).within(draw.cuts), draw.key, out.dtype)
        return out.mul_(std).add_(mean)

    def native_dropout(tensor: torch.Tensor, p: float, train: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.ones_like(tensor, dtype=torch.bool)
        if train is False:
            return tensor.clone(), mask
        draw = next_draw()
        draws.bernoulli(place_of_plain(mask).within(draw.cuts), draw.key, 1 - p)
        return dropped_out(tensor, mask, p), mask

    kernels[aten.native_dropout.default] = native_dropout
    kernels[aten.bernoulli_.Tensor] = bernoulli_of
    kernels[aten.randperm.generator_out] = randperm
    for op in PLAIN_ONLY[2:]:
        kernels[op] = normal_of
    return kernels


def dropped_out(tensor: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return what a dropout lets through, scaled as ``torch.nn.functional.dropout`` does."""
    return tensor * (mask.to(tensor.dtype) / (1 - p) if p < 1 else 0)


def _in_place(write: Write, next_draw: NextDraw) -> Callable[..., torch.Tensor]:
    def kernel(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        draw = next_draw()
        write(place_of_plain(tensor).within(draw.cuts), draw.key, tensor.dtype, *args, **named(kwargs))
        return tensor

    return kernel


_NAMES = {"from": "low", "to": "high", "p": "probability", "lambd": "rate"}


def named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return an operation's named arguments by the names that draws have for them."""
    return {_NAMES.get(name, name): value for name, value in kwargs.items() if name != "generator"}


def _refusal(op: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 -- an operation's
        raise refused(op, "a tensor")

    return kernel


def refused(op: Any, what: str) -> InvalidInputError:
    """Return the error for an operation that no index addresses."""
    return InvalidInputError(
        f"{op} of {what} draws numbers that depend on how tensors are laid out, and single_device_rng is on: make it "
        f"of uniform_, normal_, exponential_, bernoulli_ or random_, or pass a plain tensor and a generator of its own"
    )
