"""Choosing how to use the ranks that there are: every layout is weighed, and the choice says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.errors import ConfigError
from vescale_train.planner.cost import Cost, Layout, Machine, Shape, cost_of
from vescale_train.planner.layers import heads_of

if TYPE_CHECKING:
    from torch import nn

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The layout that was chosen, and those it was chosen from."""

    layout: Layout
    cost: Cost
    why: str
    weighed: tuple[tuple[Layout, Cost], ...]
    """Every layout that was allowed, the best first."""


def search(
    model: nn.Module,
    world_size: int,
    memory_bytes: int,
    *,
    tokens: int,
    item_bytes: int = 4,
    machine: Machine | None = None,
    fixed: Layout | dict[str, int | bool] | None = None,
) -> Choice:
    """Return the fastest layout of so many ranks that fits into memory, by forecast; of equals the simplest.

    Args:
        model: only its shapes count; it may be on the meta device.
        world_size: how many ranks to use; all of them are.
        memory_bytes: what one rank may need.
        tokens: of one step over all ranks.
        item_bytes: of a parameter and an activation: 4 or 2.
        machine: how fast ranks compute and exchange.
        fixed: what you have decided already: any of ``dp``, ``tp``, ``zero`` and ``ac``.

    Raises:
        ConfigError: if nothing fits, saying what would need least; or if what is fixed allows nothing.
    """
    decided = _decided(fixed)
    machine = machine or Machine()
    weighed = []
    for tp in _divisors(world_size):
        shape = None
        for layout in _layouts(world_size, tp):
            if any(getattr(layout, name) != value for name, value in decided.items()):
                continue
            shape = shape or Shape.of(model, tp)
            weighed.append((layout, cost_of(shape, layout, tokens=tokens, item_bytes=item_bytes, machine=machine)))
    if not weighed:
        raise ConfigError(f"cannot lay out {world_size} ranks with {decided}: dp x tp must be {world_size}")
    weighed.sort(
        key=lambda one: (one[1].memory_bytes > memory_bytes, one[1].seconds, one[0].zero, one[0].ac, one[0].tp)
    )
    layout, cost = weighed[0]
    if cost.memory_bytes > memory_bytes:
        least, needs = min(weighed, key=lambda one: one[1].memory_bytes)
        raise ConfigError(
            f"nothing fits: of {len(weighed)} layouts of {world_size} ranks, {least} needs least, "
            f"{needs.memory_bytes / _MIB:,.0f} MiB, and a rank has {memory_bytes / _MIB:,.0f}; use more ranks, "
            f"fewer tokens than {tokens} a step, or more micro-batches"
        )
    why = _why(weighed, memory_bytes, decided, heads_of(model)[0])
    return Choice(layout=layout, cost=cost, why=why, weighed=tuple(weighed))


def _rank(layout: Layout, cost: Cost, memory_bytes: int) -> tuple[bool, float, int, bool, int]:
    """Return what layouts are sorted by: what fits first, the fastest of it, the simplest of those."""
    return cost.memory_bytes > memory_bytes, cost.seconds, layout.zero, layout.ac, layout.tp


def _decided(fixed: Layout | dict[str, int | bool] | None) -> dict[str, int | bool]:
    if isinstance(fixed, Layout):
        return {name: getattr(fixed, name) for name in ("dp", "tp", "zero", "ac")}
    unknown = sorted(set(fixed or ()) - {"dp", "tp", "zero", "ac"})
    if unknown:
        raise ConfigError(f"cannot fix {unknown}: a layout has dp, tp, zero and ac")
    return dict(fixed or {})


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _layouts(world_size: int, tp: int) -> list[Layout]:
    """Return the layouts with so many tensor parallel ranks; without replicas there is nothing to share out."""
    dp = world_size // tp
    levels = range(4) if dp > 1 else range(1)
    return [Layout(dp=dp, tp=tp, zero=zero, ac=ac) for zero in levels for ac in (False, True)]


def _why(
    weighed: list[tuple[Layout, Cost]], memory_bytes: int, decided: dict[str, int | bool], num_heads: int | None
) -> str:
    """Return why the first of the sorted layouts is the choice."""
    layout, cost = weighed[0]
    fit = [one for one in weighed if one[1].memory_bytes <= memory_bytes]
    lines = [
        f"{layout}: the fastest of {len(fit)} that fit, of {len(weighed)}"
        + (f" with {decided} as asked" if decided else ""),
        (
            f"memory {cost.memory_bytes / _MIB:,.1f} of {memory_bytes / _MIB:,.1f} MiB: "
            f"parameters {cost.parameter_bytes / _MIB:,.1f}, gradients {cost.gradient_bytes / _MIB:,.1f}, "
            f"optimizer {cost.optimizer_bytes / _MIB:,.1f}, activations {cost.activation_bytes / _MIB:,.1f}"
        ),
        f"a step: {cost.compute_seconds:.3g} s of computing, {cost.exchange_seconds:.3g} s of exchange",
    ]
    mine = _rank(layout, cost, memory_bytes)[1:]
    better = [one for one in weighed[len(fit) :] if _rank(*one, memory_bytes)[1:] < mine]
    if better:
        other, its_cost = better[0]
        lines.append(f"{other} would come first, but needs {its_cost.memory_bytes / _MIB:,.1f} MiB")
    if len(fit) > 1:
        other, its_cost = fit[1]
        lines.append(f"next: {other}, {its_cost.seconds / cost.seconds:.2f} x the time")
    if num_heads is not None and num_heads % layout.tp:
        lines.append(f"{num_heads} heads do not divide by tp={layout.tp}: attention stays whole on every rank")
    return "\n".join(lines)
