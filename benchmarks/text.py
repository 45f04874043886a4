"""Numbers as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.results import Spread


def seconds(value: float) -> str:
    """Return seconds with three digits that count."""
    if value >= 100:
        return f"{value:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} us"


def size(value: float) -> str:
    """Return bytes in decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}" if value < factor * 999.5 else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} B"


def spread(found: Spread) -> str:
    """Return a median with its lowest and highest, as seconds."""
    if found.low == found.high:
        return seconds(found.median)
    return f"{seconds(found.median)} ({seconds(found.low)} to {seconds(found.high)})"


def quantity(name: str, value: float) -> str:
    """Return a counter by the unit in its name."""
    if "bytes" in name and "per_" not in name:
        return size(value)
    if "seconds" in name:
        return seconds(value)
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.3g}"


def title(name: str) -> str:
    """Return a counter's name as a column's title."""
    return name.removesuffix("_seconds").replace("_", " ")
