"""Values: what units give to others, by name, and trees of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree


class Value(NamedTuple):
    """One tensor that a unit gave: unit, how many times it had been called, which leaf of its output."""

    unit: int
    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class TensorForm:
    """What a stand-in for a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def flatten(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a tree of values apart."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """Put a tree of values together again."""
    return pytree.tree_unflatten(leaves, spec)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in a tree, those held by plain objects in it, too.

    A cache of keys and values, a configuration with a mask in it: objects that no tree library knows are looked into,
    two levels deep, so that nothing passes between units unseen.
    """
    return [found for leaf in pytree.tree_leaves(tree) for found in _inside(leaf, 2)]


def _inside(leaf: Any, depth: int) -> list[torch.Tensor]:
    if isinstance(leaf, torch.Tensor):
        return [leaf]
    if isinstance(leaf, (torch.nn.Module, type)) or not depth or not hasattr(leaf, "__dict__"):
        return []
    return [found for held in pytree.tree_leaves(list(vars(leaf).values())) for found in _inside(held, depth - 1)]
