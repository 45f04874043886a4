"""What a plan costs, before any step: memory of parameters on a rank, and bytes that ranks exchange for a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale_train.plan.placement import Replicate, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vescale_train.plan.names import Names
    from vescale_train.plan.resolve import Resolved


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The cost of a plan over its axis."""

    whole_bytes: int
    """All parameters, as one device holds them."""
    rank_bytes: int
    """Parameters on the rank that holds most."""
    forward_bytes: int
    """For one token: activations that are summed over ranks in forward."""
    backward_bytes: int
    """For one token: gradients of activations that are summed over ranks in backward."""

    @property
    def share(self) -> float:
        """Part of all parameters that a rank holds; 1 / ranks at best."""
        return self.rank_bytes / max(self.whole_bytes, 1)


def estimate(resolved: Resolved, names: Names, num_ranks: int, item_bytes: int = 4) -> Estimate:
    """Return the cost of a plan on so many ranks, for values of ``item_bytes`` bytes."""
    own = [name for name in names.shapes if names.tied[name] == name]
    held = sum(_held(resolved, names.shapes[name], name, num_ranks) for name in own)
    forward = backward = 0
    if num_ranks > 1:
        forward, backward = sum(_summed_forward(resolved, names)), _summed_backward(resolved, names)
    return Estimate(
        whole_bytes=item_bytes * sum(math.prod(names.shapes[name]) for name in own),
        rank_bytes=item_bytes * held,
        forward_bytes=item_bytes * forward,
        backward_bytes=item_bytes * backward,
    )


def _held(resolved: Resolved, shape: tuple[int, ...], name: str, num_ranks: int) -> int:
    """Return how many elements the first rank holds, which never holds least."""
    placement = resolved.parameters.get(name, (Replicate(),))[0]
    if isinstance(placement, Replicate):
        return math.prod(shape)
    dim: int = placement.dim  # type: ignore[attr-defined]
    parts = parts_of(placement)
    return math.prod(shape) // max(shape[dim], 1) * parts * -(-(shape[dim] // parts) // num_ranks)


def _cut_matrices(resolved: Resolved, names: Names) -> Iterator[tuple[str, tuple[int, ...], int, bool]]:
    """Yield every cut matrix: name, shape, the dim of its inputs, and whether that dim is the one that is cut."""
    for name, inputs_dim in names.inputs_dims.items():
        placement = resolved.parameters.get(names.tied[name], (Replicate(),))[0]
        if not isinstance(placement, Replicate):
            shape = names.shapes[name]
            yield name, shape, inputs_dim, placement.dim % len(shape) == inputs_dim  # type: ignore[attr-defined]


def _summed_forward(resolved: Resolved, names: Names) -> Iterator[int]:
    """Yield the outputs of matrices that are cut along their inputs: every rank has a term of them."""
    for _, shape, inputs_dim, along_inputs in _cut_matrices(resolved, names):
        if along_inputs:
            yield shape[1 - inputs_dim]


def _summed_backward(resolved: Resolved, names: Names) -> int:
    """Return the inputs of matrices that are cut along their outputs, once for those that share an input edge."""
    total, counted = 0, set()
    for name, shape, inputs_dim, along_inputs in _cut_matrices(resolved, names):
        if along_inputs:
            continue
        parent = name.rpartition(".")[0].rpartition(".")[0]
        shared = f"{parent}.input" in resolved.edges
        if not (shared and parent in counted):
            total += shape[inputs_dim]
        counted.add(parent)
    return total
