"""The random numbers of a step: those of one device in exact mode, or wherever the caller has switched them on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vescale_train.dmodule import attached
from vescale_train.engine.batch import num_samples
from vescale_train.engine.progress import progress_of
from vescale_train.rng import SingleDeviceRandom, active, single_device_rng

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn

_NAME = "_vescale_random"


@contextlib.contextmanager
def random_numbers(model: nn.Module) -> Iterator[SingleDeviceRandom | None]:
    """Give what draws for one step of a model, keyed by the step; None where torch's own generators do.

    A ``single_device_rng`` that is on already is taken; in exact mode the model has one of its own, of its seed.
    """
    rng = active()
    if rng is not None:
        rng.start_step(progress_of(model).step)
        yield rng
    elif attached(model).exact:
        with _own(model) as rng:
            rng.start_step(progress_of(model).step)
            yield rng
    else:
        yield None


def micro_batch_numbers(
    rng: SingleDeviceRandom | None, part: Any, place: tuple[int, int]
) -> AbstractContextManager[None]:
    """Return a context in which a micro-batch draws what its samples draw on one device.

    Args:
        rng: what ``random_numbers`` gave.
        part: the micro-batch; all of the step have as many samples.
        place: which micro-batch of the step it is, and how many there are, over all ranks.
    """
    if rng is None:
        return contextlib.nullcontext()
    index, total = place
    each = num_samples(part)
    return rng.batch(index * each, each, total * each)


def _own(model: nn.Module) -> SingleDeviceRandom:
    found: SingleDeviceRandom | None = model.__dict__.get(_NAME)
    if found is None:
        found = model.__dict__[_NAME] = single_device_rng(attached(model).seed, model)
    return found
