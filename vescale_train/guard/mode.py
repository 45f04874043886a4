"""The guard: sees each call of a torch function and asks the checks of its name; other calls cost a look-up."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from vescale_train.guard.checks import (
    Answer,
    check_log_softmax,
    check_loss,
    check_random,
    check_scalar,
    check_sum,
    check_write,
    mark_copies,
)
from vescale_train.guard.settings import Settings, current, using

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vescale_train.guard.checks import Check

RANDOM = frozenset(
    [
        "normal_",
        "uniform_",
        "bernoulli",
        "bernoulli_",
        "random_",
        "exponential_",
        "geometric_",
        "cauchy_",
        "log_normal_",
        "multinomial",
        "poisson",
        "dropout",
        "dropout_",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_alpha_dropout",
        "native_dropout",
        "rand_like",
        "randn_like",
        "randint_like",
        "rrelu",
        "gumbel_softmax",
        "scaled_dot_product_attention",
        "kaiming_uniform_",
        "kaiming_normal_",
        "multi_head_attention_forward",
    ]
)
SCALARS = frozenset(["item", "__float__", "__int__", "__bool__", "__index__", "__complex__", "is_nonzero"])
SUMS = frozenset(["add", "sub", "rsub", "__add__", "__radd__", "__sub__", "__rsub__", "subtract"])
LOSSES = frozenset(["cross_entropy", "nll_loss"])
VIEWS = frozenset(
    [
        "__getitem__",
        "select",
        "narrow",
        "view",
        "view_as",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "diagonal",
        "squeeze",
        "unsqueeze",
        "t",
        "transpose",
        "permute",
        "swapaxes",
        "movedim",
        "expand",
        "unflatten",
        "detach",
    ]
)


def checks_of(name: str) -> tuple[Check, ...]:
    """Return the checks for a function's name."""
    found: list[Check] = []
    if name in RANDOM:
        found.append(check_random)
    if name == "__setitem__" or name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
        found.append(check_write)
    if name in SCALARS:
        found.append(check_scalar)
    if name in SUMS:
        found.append(check_sum)
    if name in LOSSES:
        found.append(check_loss)
    if name == "log_softmax":
        found.append(check_log_softmax)
    return tuple(found)


_IN_PLACE_OPERATORS = frozenset(
    f"__i{op}__" for op in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
)
_known: dict[str, tuple[Check, ...]] = {}


class _Guard(TorchFunctionMode):
    """Asks before each call, and looks at what views come to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if current().mode == "off":
            return func(*args, **kwargs)
        checks = _known.get(name)
        if checks is None:
            checks = _known[name] = checks_of(name)
        for check in checks:
            found = check(name, args, kwargs)
            if isinstance(found, Answer):
                return found.value
            args, kwargs = found
        result = func(*args, **kwargs)
        if name in VIEWS and args:
            mark_copies(args[0], result)
        return result


@contextmanager
def guard(mode: str = "raise", *, scalar_reads: str = "refuse") -> Iterator[None]:
    """Turn what torch's DTensors get wrong in silence into errors, for the time of the block.

    S1 random numbers of shards, S2 writes through gathered slices, S3 and S12 scalars of pending sums, S10 means of
    means, S13 gradients of a log_softmax in ``loss_parallel`` are refused. S11, a number added to a pending sum, is
    put right.

    Args:
        mode: "raise"; "warn": say so and let torch go on; "off": in a block of another guard, let all be.
        scalar_reads: "refuse" scalars of pending sums, or "reduce" them: right, but then every rank must read, where it
            is common that only the first one does, which would wait for the others.

    Raises:
        ConfigError: there is no such mode or way.
        SilentFaultError: in the block, at a call that would go wrong.
    """
    outer = current()
    settings = Settings(mode, scalar_reads, outer.exempt)
    with using(settings):
        if mode == "off" or outer.mode != "off":
            yield
        else:
            with _Guard():
                yield
