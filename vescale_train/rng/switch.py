"""The switch: while it is on, random numbers are those of one device, whatever the layout of tensors."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from vescale_train.errors import InvalidInputError, StateError
from vescale_train.rng import init
from vescale_train.rng.handlers import Handlers
from vescale_train.rng.kernels import plain_kernels
from vescale_train.rng.place import Cut
from vescale_train.rng.stream import Scope, Stream
from vescale_train.torch_private import dtensor_handlers, replaced_kernels, replaced_truncated_normal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from torch import nn

_active: list[SingleDeviceRandom] = []
"""The one that is on, if any."""


class SingleDeviceRandom:
    """Random numbers of one device; made and switched on by ``single_device_rng``.

    Every rank must draw in the same order as the others within a module, and the numbers of a draw depend on the seed,
    the step, the name of the module whose forward runs, how often it drew before in this step (or micro-batch), and the
    index of the element in the whole tensor. So they are the same on one rank and on many.
    """

    def __init__(self, seed: int, model: nn.Module | None = None) -> None:
        self._stream = Stream(seed)
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._on: ExitStack | None = None
        if model is not None:
            self.name_modules(model)

    @property
    def seed(self) -> int:
        """The seed; ``torch.manual_seed`` changes it while the switch is on."""
        return self._stream.seed

    @property
    def step(self) -> int:
        """The step that draws are keyed by."""
        return self._stream.step

    def name_modules(self, model: nn.Module, prefix: str = "") -> None:
        """Name the modules that draw: their names are part of the key, so stages and the whole model draw alike."""
        for name, module in model.named_modules(prefix=prefix):
            self._names[module] = name

    def start_step(self, step: int | None = None) -> None:
        """Begin the next step, or the one given; draws of another step have other keys."""
        self._stream.start_step(self._stream.step + 1 if step is None else step)

    @contextmanager
    def batch(self, start: int, count: int, total: int, *, dim: int = 0) -> Iterator[None]:
        """Run the forward pass of a micro-batch: ``count`` samples, from ``start`` on, of the step's ``total``.

        Plain tensors drawn inside, and DTensors, are parts along ``dim`` of those of the whole batch, so that a sample
        has its numbers wherever it is. A dim that holds several indexes a sample (tokens) is cut accordingly.

        Raises:
            StateError: a sample was in another micro-batch of this step: the step was not ended.
            InvalidInputError: the samples are not within ``total``.
        """
        cut, stream = Cut(dim, start, count, total), self._stream
        for other, first, stop in stream.samples:
            if other == dim and first < start + count and start < stop:
                raise StateError(
                    f"samples {start} to {start + count} would draw what samples {first} to {stop} drew in step "
                    f"{stream.step} already: call start_step() when a step begins",
                    step=stream.step,
                )
        stream.samples.append((dim, start, start + count))
        with self._scope(Scope(cuts=(*stream.scopes[-1].cuts, cut))):
            yield

    @contextmanager
    def part(self, dim: int, start: int, count: int, total: int) -> Iterator[None]:
        """Say that plain tensors are parts along another dim too, as attention heads are under tensor parallel."""
        above = self._stream.scopes[-1]
        with self._scope(Scope(above.calls, (*above.cuts, Cut(dim, start, count, total)))):
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Draw the same on every rank: plain tensors are whole."""
        with self._scope(Scope(self._stream.scopes[-1].calls)):
            yield

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Draw under a name, as the forward of a module of that name does."""
        self._stream.names.append(name)
        try:
            yield
        finally:
            self._stream.names.pop()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws depend on: plain values, the same on all ranks, to save with the model."""
        return self._stream.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` returned, on any number of ranks.

        Raises:
            ConfigError: it is no such state.
        """
        was_on = self._on is not None
        before = None if was_on else torch.default_generator.get_state()
        self._stream.load(state)
        if before is not None:
            torch.default_generator.set_state(before)

    get_state = state_dict
    set_state = load_state_dict

    def __enter__(self) -> Self:
        """Switch on."""
        if _active:
            raise StateError("single_device_rng is on already: there is one stream of numbers in a process")
        with ExitStack() as stack:
            stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
            self._stream.mark()
            kernels = plain_kernels(self._stream.next_draw)
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
                stack.enter_context(replaced_kernels(kernels, device))
            stack.enter_context(_replaced(dtensor_handlers(), Handlers(self._stream.next_draw).table()))
            stack.enter_context(replaced_truncated_normal(init.truncated_normal(self._stream.next_draw)))
            stack.callback(register_module_forward_pre_hook(self._enter_module).remove)
            stack.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
            _active.append(self)
            stack.callback(_active.clear)
            self._on = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Switch off; torch's own generators are as they were."""
        if self._on is not None:
            self._on.close()
            self._on = None

    @contextmanager
    def _scope(self, scope: Scope) -> Iterator[None]:
        self._stream.scopes.append(scope)
        try:
            yield
        finally:
            self._stream.scopes.pop()

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        names = self._stream.names
        names.append(self._names.get(module, names[-1] if names else ""))

    def _leave_module(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stream.names:  # empty where the switch was turned on inside of a forward
            self._stream.names.pop()


def single_device_rng(seed: int, model: nn.Module | None = None) -> SingleDeviceRandom:
    """Return the switch, to be used as a context: inside, random numbers are those of one device on any layout.

    Example::

        with single_device_rng(17, model) as rng:
            initialize(model)
            for step, (start, count, batch) in enumerate(batches):
                rng.start_step(step)
                with rng.batch(start, count, total):
                    loss = model(batch)

    Args:
        seed: In ``[0, 2^64)``; the same on all ranks.
        model: Names the modules that draw; ``name_modules`` does it later, and for a stage.

    Raises:
        ConfigError: it is no seed.
    """
    return SingleDeviceRandom(seed, model)


def active() -> SingleDeviceRandom | None:
    """Return the one that is on."""
    return _active[-1] if _active else None


def initialize(model: nn.Module, rng: SingleDeviceRandom | None = None, prefix: str = "") -> None:
    """Call every module's ``reset_parameters`` under its own name, parents first; plain tensors or DTensors alike.

    A part of a model (``prefix`` says where it stands) gets the numbers that the whole model gives it.

    Raises:
        StateError: no switch is on.
        InvalidInputError: a module has parameters of its own and no ``reset_parameters``.
    """
    rng = active() if rng is None else rng
    if rng is None:
        raise StateError("initialize needs single_device_rng: numbers drawn without it differ from layout to layout")
    for name, module in model.named_modules(prefix=prefix):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is None:
            if next(module.parameters(recurse=False), None) is not None:
                raise InvalidInputError(f"'{name}' ({type(module).__name__}) has no reset_parameters to call", fqn=name)
            continue
        with rng.named(f"init:{name}"):
            reset()


@contextmanager
def _replaced(table: dict[Any, Any], entries: dict[Any, Any]) -> Iterator[None]:
    """Put entries into a table for the time of the block."""
    before = {key: table[key] for key in entries if key in table}
    table.update(entries)
    try:
        yield
    finally:
        for key in entries:
            del table[key]
        table.update(before)
