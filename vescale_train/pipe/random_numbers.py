"""Random numbers of a micro-batch: those that its samples have on one device, where the caller has switched that on."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from vescale_train.rng import active

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.pipe.batch import MicroBatch


@contextlib.contextmanager
def numbers_of(micro: MicroBatch, *, again: bool) -> Iterator[None]:
    """Draw in the block what the samples of a micro-batch draw on one device, if ``single_device_rng`` is on.

    Args:
        micro: the micro-batch.
        again: another stage of this rank has run it in this step. Its modules have other names and draw other numbers,
            so the guard against one sample drawing twice has to forget it.
    """
    random = active()
    if random is None:
        yield
        return
    if again:
        samples = random._stream.samples  # noqa: SLF001 - a stage is the one caller that comes back within a step
        samples.remove((0, micro.start, micro.start + micro.count))
    with random.batch(micro.start, micro.count, micro.total):
        yield
