"""The rules inside a parallel model's forward: what each torch function does when a DTensor is among its arguments.

Plain tensors are the same on every rank, whether they came from outside or were made inside (``arange``, masks): they
join DTensors as replicated ones when the two meet. What comes out whole is plain again, so that the parts of a model
that are not cut run as they would on one device.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.overrides import TorchFunctionMode

from vescale_train.dmodule.layouts import is_partial, is_replicated, laid, mapped, plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch.distributed.device_mesh import DeviceMesh

_QUESTIONS = frozenset(
    {
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_contiguous",
        "__len__",
        "is_floating_point",
        "is_complex",
        "element_size",
        "data_ptr",
        "get_device",
        "requires_grad_",
        "register_hook",
        "backward",
        "__repr__",
        "__hash__",
        "storage_offset",
        "is_same_size",
    }
)
"""Functions that ask about a tensor, or about its graph, and that DTensor answers for the whole of it."""


_KEEPERS = (Tensor.detach, Tensor.requires_grad_)
"""Functions whose result is laid out as their argument: wrappers around modules make parameters by these."""

_RESHAPES = frozenset({"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "flatten", "contiguous"})
"""Functions of which the terms of a sum may be arguments: the sum can wait until the plan says who wants it."""

_NO_RULE = (NotImplementedError, RuntimeError, IndexError, ValueError, AssertionError)
"""What torch raises where it has no rule for parts, or one that an uneven shard does not fit. A fault of the
caller is raised again, in plain words, when the function runs whole."""


class ExactRegion(TorchFunctionMode):
    """Every function runs whole, with the same shapes and the same bits as on one device: parameters are gathered."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on whole tensors."""
        kwargs = kwargs or {}
        if not any(True for _ in dtensors_in(args, kwargs)):
            return func(*args, **kwargs)
        if _asks(func):
            answer = func(*args, **kwargs)
            if not isinstance(answer, DTensor) or func in _KEEPERS:
                return answer
        if _writes(func, kwargs) and isinstance(args[0] if args else None, DTensor):
            return func(*args, **kwargs)
        return func(*mapped(plain, args), **mapped(plain, kwargs))


class Region(TorchFunctionMode):
    """Functions run on the parts that ranks hold, where that is right, and otherwise whole."""

    def __init__(self, mesh: DeviceMesh, rules: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self.mesh = mesh
        """The tensor parallel axis."""
        self.whole_runs: Counter[str] = Counter()
        """Functions that torch cannot run on parts -> how often they ran whole instead."""
        self._rules = rules

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` by its own rule if it has one, else by the general one."""
        kwargs = kwargs or {}
        if _asks(func) or not any(True for _ in dtensors_in(args, kwargs)):
            return func(*args, **kwargs)
        rule = self._rules.get(func)
        done = NotImplemented if rule is None else rule(self.mesh, *args, **kwargs)
        return self._general(func, args, kwargs) if done is NotImplemented else mapped(_plain_if_whole, done)

    def _general(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Sum what ranks hold terms of; then run on parts if there are any, and otherwise as on one device."""
        if getattr(func, "__name__", "") not in _RESHAPES:
            args, kwargs = mapped(_summed, args), mapped(_summed, kwargs)
        if _writes(func, kwargs):
            return self._write(func, args, kwargs)
        if all(is_replicated(one) for one in dtensors_in(args, kwargs)):
            return func(*mapped(plain, args), **mapped(plain, kwargs))
        return self._compute(func, args, kwargs)

    def _compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on parts, by torch's own rules; whole where torch has none that fits."""
        try:
            done = func(*mapped(self._joined, args), **mapped(self._joined, kwargs))
        except _NO_RULE:
            self.whole_runs[getattr(func, "__name__", repr(func))] += 1
            return func(*mapped(plain, args), **mapped(plain, kwargs))
        reshaped = any(is_partial(one) for one in dtensors_in(args))
        return mapped(_plain_if_whole, done if reshaped else mapped(_summed, done))

    def _write(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that writes into its first argument, which stays what it is."""
        if isinstance(args[0] if args else None, DTensor):
            return func(*mapped(self._joined, args), **mapped(self._joined, kwargs))
        return func(*mapped(plain, args), **mapped(plain, kwargs))

    def _joined(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, DTensor) else laid(tensor, self.mesh, [Replicate()])


def dtensors_in(*values: Any) -> Iterator[DTensor]:
    """Yield the DTensors in arguments, also those inside lists, tuples and dicts."""
    for value in values:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from dtensors_in(*value)
        elif isinstance(value, dict):
            yield from dtensors_in(*value.values())


def _summed(tensor: Tensor) -> Tensor:
    """Return a tensor in which no rank holds a mere term of a sum."""
    return plain(tensor) if is_partial(tensor) else tensor


def _plain_if_whole(tensor: Tensor) -> Tensor:
    return plain(tensor) if isinstance(tensor, DTensor) and is_replicated(tensor) else tensor


def _asks(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name in {"__get__", "__set__"} or name in _QUESTIONS or func in _KEEPERS


def _writes(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"} or "out" in kwargs
