"""Proposing a plan for a model that nobody wrote one for, with the reason for every key."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from vescale_train.mesh import size
from vescale_train.plan import Interleaved, Plan, Replicate, Shard
from vescale_train.planner.families import FAMILIES, Family
from vescale_train.planner.layers import Layer, heads_of, layers_of
from vescale_train.planner.roles import Role, roles_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import nn

    from vescale_train.plan import Placement

_SEQUENCE = Shard(1)
_WHOLE = Replicate()


def propose(
    model: nn.Module,
    mesh: DeviceMesh | int,
    *,
    sequence: bool = False,
    overrides: Plan | Mapping[str, Any] | None = None,
) -> Plan:
    """Return a plan that cuts the model over the mesh's ``tp`` axis; ``explain`` says why.

    Layers that make heads or widen are cut by their outputs, those that take these by their inputs, so that a block
    needs one sum over ranks; the vocabulary is cut by rows. What the planner does not know stays whole, and so does
    attention whose heads cannot be shared out. Any plan gives right results; this one wants to give them fast.

    Args:
        model: of any kind; families that Hugging Face names in ``config.model_type`` are known, others are read.
        mesh: the mesh, or how many ranks its ``tp`` axis has.
        sequence: also share out the residual stream along the sequence, for families that say where it begins.
        overrides: what you want otherwise; it wins wherever it names something.
    """
    num_ranks = size(mesh, "tp") if isinstance(mesh, DeviceMesh) else mesh
    draft = _Draft()
    if num_ranks > 1:
        _draft(draft, model, num_ranks, sequence=sequence)
    return Plan(parameter=draft.parameter, forward=draft.forward, why=draft.why).overridden(overrides)


def explain(plan: Plan) -> str:
    """Return the plan's keys with the reason for each, a line a key."""
    lines = [f"{key}: {reason}" for key, reason in plan.why.items()]
    if plan.overrides is not None:
        lines += [f"{key}: asked for" for key in (*plan.overrides.parameter, *plan.overrides.forward)]
    return "\n".join(lines)


class _Draft:
    """A plan while it is written: names of repeated blocks share a key."""

    def __init__(self) -> None:
        self.parameter: dict[str, tuple[Placement, ...]] = {}
        self.forward: dict[str, tuple[tuple[Placement, ...], ...]] = {}
        self.why: dict[str, str] = {}

    def cut(self, name: str, placement: Placement, why: str) -> None:
        """Place a parameter."""
        self.parameter[pattern(name)] = (placement,)
        self.why[pattern(name)] = why

    def edge(self, name: str, placement: Placement, why: str) -> None:
        """Lay out the first value at an edge."""
        self.forward[pattern(name)] = ((placement,),)
        self.why[pattern(name)] = why


def pattern(name: str) -> str:
    """Return the regex of a name in which every number between dots may be any."""
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))


def _draft(draft: _Draft, model: nn.Module, num_ranks: int, *, sequence: bool) -> None:
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    layers = layers_of(model)
    kept = _shareable(roles_of(layers, family), model, num_ranks, draft)
    for role in kept:
        _cut_layer(draft, role, num_ranks)
    _cut_vocabulary(draft, model, layers, kept, num_ranks)
    if sequence and family is not None and family.entry:
        _share_sequence(draft, kept, family, [name for name, _ in model.named_modules()])
    else:
        _join_inputs(draft, kept)


def _shareable(roles: Sequence[Role], model: nn.Module, num_ranks: int, draft: _Draft) -> list[Role]:
    """Return the roles that stand on so many ranks; the others' layers stay whole, and the draft says why."""
    queries, keys = heads_of(model)
    kept = []
    for role in roles:
        name, reason = pattern(role.layer.name), ""
        if role.attention and queries is not None and queries % num_ranks:
            reason = f"{queries} heads cannot be shared out among {num_ranks} ranks"
        elif role.keys and keys is not None and keys % num_ranks:
            reason = f"{keys} heads of keys cannot be shared out among {num_ranks} ranks; each takes what it needs"
        elif _width(role) < num_ranks:
            reason = f"it is narrower than {num_ranks} ranks"
        if reason:
            draft.why[name] = f"whole: {reason}"
        else:
            kept.append(role)
    return kept


def _width(role: Role) -> int:
    return role.layer.outputs // role.parts if role.cut == "columns" else role.layer.inputs


def _cut_layer(draft: _Draft, role: Role, num_ranks: int) -> None:
    layer, part = role.layer, role.layer.outputs // role.parts
    if role.cut == "rows":
        draft.cut(f"{layer.name}.weight", Shard(layer.inputs_dim), f"rows: {role.why}; one sum over ranks follows")
        return
    fused = role.parts > 1 and part % num_ranks == 0
    place = Interleaved if fused else lambda dim, _: Shard(dim)
    said = f"columns, each of {role.parts} parts for itself: {role.why}" if fused else f"columns: {role.why}"
    draft.cut(f"{layer.name}.weight", place(layer.outputs_dim, role.parts), said)
    if layer.biased and not fused:  # FSDP2 cuts dim 0 again and describes a cut of interleaved parts wrongly
        draft.cut(f"{layer.name}.bias", Shard(0), said)


def _cut_vocabulary(
    draft: _Draft, model: nn.Module, layers: Sequence[Layer], kept: Iterable[Role], num_ranks: int
) -> None:
    """Cut the largest embedding by rows, and the layers outside blocks that map to as many outputs."""
    tables = [layer for layer in layers if layer.kind == "embedding"]
    if not tables:
        return
    words = max(tables, key=lambda layer: layer.inputs)
    if words.inputs < max(num_ranks, words.outputs // 2):  # a table of positions or types alone is not worth a sum
        return
    shapes = dict(model.named_parameters())
    draft.cut(f"{words.name}.weight", Shard(0), "the vocabulary by rows: the largest table")
    taken = {role.layer.name for role in kept}
    for layer in layers:
        if layer.kind == "linear" and layer.name not in taken and layer.outputs == words.inputs:
            for short in ("weight", "bias"):
                if f"{layer.name}.{short}" in shapes:  # one that is tied stands under its first name
                    dim = layer.outputs_dim if short == "weight" else 0
                    draft.cut(f"{layer.name}.{short}", Shard(dim), "makes logits: cut as the vocabulary")


def _join_inputs(draft: _Draft, kept: Sequence[Role]) -> None:
    """Where several layers of one parent take the same input, let its gradients be summed over ranks once."""
    columns = [role.layer.parent for role in kept if role.cut == "columns" and role.layer.outputs_dim == 0]
    for parent in dict.fromkeys(columns):
        if columns.count(parent) > 1 and parent:
            draft.edge(f"{parent}.input", _WHOLE, "several layers take this input: one sum of its gradient")


def _share_sequence(draft: _Draft, kept: Sequence[Role], family: Family, modules: Sequence[str]) -> None:
    """Keep the residual stream in parts of the sequence: blocks gather what they take and scatter what they give."""
    for name in modules:
        if _ends(name, family.entry):
            draft.edge(f"{name}.output", _SEQUENCE, "the residual stream begins: in parts of the sequence from here")
        if _ends(name, family.exit):
            draft.edge(f"{name}.output", _WHOLE, "the residual stream ends: gathered")
    for role in kept:
        if role.cut == "rows":
            draft.edge(f"{role.layer.name}.output", _SEQUENCE, "summed over ranks and scattered along the sequence")
        elif role.layer.parent:
            draft.edge(f"{role.layer.parent}.input", _WHOLE, "gathered along the sequence")


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
