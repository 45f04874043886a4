"""Memory and time of one training step of a model under one layout, as a forecast from its shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from vescale_train.plan import Names, estimate, resolve
from vescale_train.planner.families import FAMILIES
from vescale_train.planner.layers import layers_of
from vescale_train.planner.propose import propose
from vescale_train.planner.roles import roles_of

if TYPE_CHECKING:
    from vescale_train.planner.layers import Layer

OPTIMIZER_BYTES = 8
"""Adam's two moments of one parameter, in fp32."""
MASTER_BYTES = 4
"""The fp32 copy of a parameter that is not fp32 itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a rank runs on."""

    flops_per_second: float = 2e14
    link_bytes_per_second: float = 1e11
    """Between ranks, in one direction, at large messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One way to use all ranks."""

    dp: int
    tp: int
    zero: int
    """What replicas share out: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""
    ac: bool
    """Activation checkpointing: blocks keep their inputs alone and run again in backward."""

    def __str__(self) -> str:
        return f"dp={self.dp}, tp={self.tp}, zero={self.zero}, ac={'on' if self.ac else 'off'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What a step needs on the rank that needs most."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    compute_seconds: float
    exchange_seconds: float

    @property
    def memory_bytes(self) -> int:
        """All of it together."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """Of one step, with nothing hidden behind anything."""
        return self.compute_seconds + self.exchange_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model's numbers at one size of the tensor parallel axis."""

    num_parameters: int
    """Of the whole model; tied ones once."""
    rank_parameters: int
    """On the rank that holds most."""
    token_values: int
    """Activations that backward needs, for one token."""
    checkpointed_values: int
    """The same with activation checkpointing: the inputs of blocks, and one block's own."""
    forward_values: int
    """Activations summed over ranks in forward, for one token."""
    backward_values: int

    @classmethod
    def of(cls, model: nn.Module, tp: int) -> Shape:
        """Return the numbers of a model under the plan that is proposed for it."""
        names = Names.of(model)
        resolved = resolve(propose(model, tp), names, tp)
        found = estimate(resolved, names, tp, item_bytes=1)
        layers = [layer for layer in layers_of(model) if layer.kind == "linear"]
        family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
        cut = {role.layer.name: role.cut for role in roles_of(layers, family)}
        kept = [layer for layer in layers if f"{layer.name}.weight" in resolved.parameters]
        values = {layer.name: _values(layer, cut.get(layer.name) if layer in kept else None, tp) for layer in layers}
        blocks = _num_blocks(model)
        width = min((layer.inputs for layer in layers), default=0)
        inside = sum(value for name, value in values.items() if _in_block(name))
        outside = sum(values.values()) - inside
        return cls(
            num_parameters=found.whole_bytes,
            rank_parameters=found.rank_bytes,
            token_values=inside + outside,
            checkpointed_values=blocks * width + inside // max(blocks, 1) + outside if blocks else inside + outside,
            forward_values=found.forward_bytes,
            backward_values=found.backward_bytes,
        )


def cost_of(shape: Shape, layout: Layout, *, tokens: int, item_bytes: int, machine: Machine) -> Cost:
    """Return the forecast for a step of ``tokens`` tokens over all ranks, in values of ``item_bytes`` bytes."""
    share = [1, 1, 1, 1]
    for part in range(layout.zero):
        share[part] = layout.dp  # optimizer, gradients, parameters: each step shares out one more
    rank = shape.rank_parameters
    state_bytes = OPTIMIZER_BYTES + (MASTER_BYTES if item_bytes < 4 else 0)
    mine = -(-tokens // layout.dp)
    kept = shape.checkpointed_values if layout.ac else shape.token_values
    summed = shape.forward_values * (2 if layout.ac else 1) + shape.backward_values
    rounds = 3 if layout.zero == 3 else 2  # gather, gather again, scatter; or scatter and gather
    sent = rounds * rank * item_bytes * (layout.dp - 1) / layout.dp
    sent += 2 * summed * mine * item_bytes * (layout.tp - 1) / layout.tp
    work = (8 if layout.ac else 6) * shape.num_parameters * tokens / (layout.dp * layout.tp)
    return Cost(
        parameter_bytes=-(-rank * item_bytes // share[2]),
        gradient_bytes=-(-rank * item_bytes // share[1]),
        optimizer_bytes=-(-rank * state_bytes // share[0]),
        activation_bytes=kept * mine * item_bytes,
        compute_seconds=work / machine.flops_per_second,
        exchange_seconds=sent / machine.link_bytes_per_second,
    )


def _values(layer: Layer, cut: str | None, tp: int) -> int:
    """Return what backward needs of a layer for one token: its input, and its output for what follows."""
    inputs = layer.inputs // tp if cut == "rows" else layer.inputs
    return inputs + (layer.outputs // tp if cut == "columns" else layer.outputs)


def _num_blocks(model: nn.Module) -> int:
    """Return the length of the longest list of modules that hold linear layers."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    return max((len(one) for one in lists if len(one) and layers_of(one[0])), default=0)


def _in_block(name: str) -> bool:
    return any(part.isdigit() for part in name.split("."))
