"""What the guard does about a fault, here and now."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError, SilentFaultError

if TYPE_CHECKING:
    from collections.abc import Iterator

MODES = ("off", "warn", "raise")
SCALAR_READS = ("refuse", "reduce")


class SilentFaultWarning(UserWarning):
    """torch is about to compute something else than one device would, without an error."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The mode, how scalars of pending sums are read, and faults that are seen to elsewhere."""

    mode: str = "off"
    scalar_reads: str = "refuse"
    exempt: frozenset[str] = frozenset()


_settings: ContextVar[Settings] = ContextVar("vescale_guard", default=Settings())  # noqa: B039 -- it is frozen


def current() -> Settings:
    """Return the settings in this thread or task."""
    return _settings.get()


@contextmanager
def using(settings: Settings) -> Iterator[None]:
    """Set them for the time of the block.

    Raises:
        ConfigError: there is no such mode or way.
    """
    if settings.mode not in MODES or settings.scalar_reads not in SCALAR_READS:
        raise ConfigError(
            f"a guard's mode is one of {MODES} and scalar_reads one of {SCALAR_READS}, not {settings.mode!r} and "
            f"{settings.scalar_reads!r}"
        )
    token = _settings.set(settings)
    try:
        yield
    finally:
        _settings.reset(token)


@contextmanager
def exempt(*faults: str) -> Iterator[None]:
    """Let some faults be: the code in the block sees to them."""
    now = current()
    with using(replace(now, exempt=now.exempt | set(faults))):
        yield


def report(fault: str, message: str) -> None:
    """Raise or warn as the mode says, or do nothing where the fault is exempt.

    Raises:
        SilentFaultError: the mode is "raise".
    """
    now = current()
    if now.mode == "off" or fault in now.exempt:
        return
    if now.mode == "warn":
        warnings.warn(f"{fault}: {message}", SilentFaultWarning, stacklevel=5)
        return
    raise SilentFaultError(f"{fault}: {message}", fault=fault)
