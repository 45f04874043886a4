"""States to save: a GPT with its Adam moments, by shapes alone, and what is done to them between saves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks.case import Scale

State: TypeAlias = dict[str, torch.Tensor]
"""Name -> tensor: a form that every peer takes as it is."""

CONTEXT = 1024
_BYTES_PER_PARAMETER = 12
"""Weight and two moments, in float32."""


def gpt_shapes(width: int, num_layers: int, vocab_size: int, context: int = CONTEXT) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the parameters of a GPT-2, head and embedding tied."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocab_size, width), "wpe.weight": (context, width)}
    for layer in range(num_layers):
        for name, shape in (
            ("ln_1.weight", (width,)),
            ("ln_1.bias", (width,)),
            ("attn.c_attn.weight", (3 * width, width)),
            ("attn.c_attn.bias", (3 * width,)),
            ("attn.c_proj.weight", (width, width)),
            ("attn.c_proj.bias", (width,)),
            ("ln_2.weight", (width,)),
            ("ln_2.bias", (width,)),
            ("mlp.c_fc.weight", (4 * width, width)),
            ("mlp.c_fc.bias", (4 * width,)),
            ("mlp.c_proj.weight", (width, 4 * width)),
            ("mlp.c_proj.bias", (width,)),
        ):
            shapes[f"h.{layer}.{name}"] = shape
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (width,)
    return shapes


def num_layers(state_bytes: int, width: int, vocab_size: int, context: int = CONTEXT) -> int:
    """Return how many layers bring a GPT with its moments nearest to a size; at least one."""
    none = sum(map(math.prod, gpt_shapes(width, 0, vocab_size, context).values()))
    one = sum(map(math.prod, gpt_shapes(width, 1, vocab_size, context).values())) - none
    return max(1, round((state_bytes / _BYTES_PER_PARAMETER - none) / one))


def scale_shapes(scale: Scale) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the scale's model: GPT-2 medium's width at full scale, fewer layers."""
    context = min(CONTEXT, scale.vocab_size)
    layers = num_layers(scale.state_bytes, scale.width, scale.vocab_size, context)
    return gpt_shapes(scale.width, layers, scale.vocab_size, context)


def with_moments(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> State:
    """Return a model's weights, Adam's two moments and step count of each, filled with noise."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for name, shape in shapes.items():
        state[f"model.{name}"] = noise(shape, generator)
        state[f"optimizer.state.{name}.exp_avg"] = noise(shape, generator)
        state[f"optimizer.state.{name}.exp_avg_sq"] = noise(shape, generator).square_()
        state[f"optimizer.state.{name}.step"] = torch.tensor(float(seed))
    return state


def noise(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal noise; of a large tensor only the first million items are drawn and then repeated, shifted."""
    count, most = math.prod(shape), 1 << 20
    drawn = torch.randn(min(count, most), generator=generator)
    if count <= most:
        return drawn.reshape(shape)
    out = torch.empty(count)
    for number, start in enumerate(range(0, count, most)):
        part = out[start : start + most]
        torch.add(drawn[: part.numel()], number * 1e-3, out=part)
    return out.reshape(shape)


def change(state: Mapping[str, torch.Tensor]) -> None:
    """Change every tensor, as a step of training does, so that nothing saved before serves again."""
    for tensor in state.values():
        tensor.add_(1e-3 if tensor.is_floating_point() else 1)


def blank_like(state: Mapping[str, torch.Tensor]) -> State:
    """Return a state of the same shapes, its memory touched, to load into."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def spoil(state: Mapping[str, torch.Tensor]) -> None:
    """Make every tensor wrong."""
    for tensor in state.values():
        tensor.fill_(-12345)


def require_equal(state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse a load that did not bring what was saved.

    Raises:
        RuntimeError: names the first tensor that differs.
    """
    for name, tensor in expected.items():
        if not torch.equal(state[name], tensor):
            raise RuntimeError(f"what was loaded differs from what was saved in {name!r}")


def state_bytes(state: Mapping[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
