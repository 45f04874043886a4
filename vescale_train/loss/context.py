"""A block in which models that call torch's cross entropy themselves get the right one."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vescale_train.guard import exempt
from vescale_train.loss.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Reroute(TorchFunctionMode):
    """Sends ``cross_entropy`` of DTensors here; all else goes its way, so that ``log_softmax`` stays itself."""

    def __init__(self, *, exact: bool) -> None:
        super().__init__()
        self._exact = exact

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.cross_entropy and _is_laid_out(args, kwargs):
            return _call(self._exact, *args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def parallel_loss(*, exact: bool = False) -> Iterator[None]:
    """Let ``functional.cross_entropy`` (and ``nn.CrossEntropyLoss``, and Hugging Face's losses) of DTensors be ours.

    Unlike torch's ``loss_parallel`` it changes no other function and leaves nothing behind after an exception.
    """
    with exempt("S10"), _Reroute(exact=exact):
        yield


def _is_laid_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    logits = args[0] if args else kwargs.get("input")
    return isinstance(logits, DTensor)


def _call(  # noqa: PLR0913, PLR0917 -- torch's signature
    exact: bool,
    input: Any,  # noqa: A002 -- torch's name
    target: Any,
    weight: Any = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    return cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        exact=exact,
    )
