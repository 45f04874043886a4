"""Gradients of parameters that several stages hold: summed over stages, the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_train.pipe.run.units import UnitGradients, add_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from vescale_train.pipe.stage import PipeStage
    from vescale_train.pipe.ties import Tie

Units = dict[int, torch.Tensor]
"""Micro-batch -> gradient; of sums over all micro-batches: 0 -> gradient."""


def sum_ties(stage: PipeStage, units: UnitGradients, *, exact: bool) -> None:
    """Give every holder of a tied parameter the sum of all stages' gradients.

    In exact mode each micro-batch is summed from the last stage to the first, as a backward of the whole model meets
    the uses of a parameter, and micro-batches in order. Otherwise stages' sums are added.
    """
    if not stage.ties:
        return
    shares = [_own_share(stage, tie, units, exact=exact) for tie in stage.ties]
    there = _who_has_what(stage, shares)
    for tie, share, known in zip(stage.ties, shares, there, strict=True):
        if share:
            parameters = {number: _parameter(stage, tie, number) for number in share}
            _exchange(stage, tie, share, known, parameters)
            _add_up(share, parameters)


def _parameter(stage: PipeStage, tie: Tie, number: int) -> nn.Parameter:
    return stage.module.get_parameter(tie.name_on[tie.stages.index(number)])


def _own_share(stage: PipeStage, tie: Tie, units: UnitGradients, *, exact: bool) -> dict[int, Units]:
    """Return for each stage of this rank that holds it what its backward gave, taken away from the parameter."""
    share: dict[int, Units] = {}
    seen: set[int] = set()
    for number in tie.stages:
        if number not in stage.stages:
            continue
        parameter = _parameter(stage, tie, number)
        if exact:
            share[number] = units.take(number, parameter)
        elif id(parameter) not in seen and parameter.grad is not None:
            # two stages of one rank share the parameter, and its gradient has both their parts already
            share[number] = {0: parameter.grad}
            parameter.grad = None
        else:
            share[number] = {}
        seen.add(id(parameter))
    return share


def _who_has_what(stage: PipeStage, shares: list[dict[int, Units]]) -> list[dict[int, list[int]]]:
    """Return for each tie the micro-batches for which each stage has a gradient; one collective."""
    place = stage.place
    size = (len(stage.ties), stage.num_stages, stage.plan.num_microbatches)
    flags = torch.zeros(size, dtype=torch.int64, device=stage.front.device)
    for tie, share in enumerate(shares):
        for number, units in share.items():
            for microbatch in units:
                flags[tie, number, microbatch] = 1
    if place.group is not None and place.num_ranks > 1:
        dist.all_reduce(flags, group=place.group)
    table = flags.cpu()
    return [
        {number: table[tie, number].nonzero().flatten().tolist() for number in stage.ties[tie].stages}
        for tie in range(len(shares))
    ]


def _exchange(
    stage: PipeStage,
    tie: Tie,
    share: dict[int, Units],
    known: Mapping[int, list[int]],
    parameters: Mapping[int, nn.Parameter],
) -> None:
    """Fill ``share`` with what the stages of other ranks have."""
    place = stage.place
    rank_of = {number: stage.plan.rank_of(number, place.num_ranks) for number in tie.stages}
    operations: list[dist.P2POp] = []
    arriving: dict[int, torch.Tensor] = {}
    others = sorted({rank for rank in rank_of.values() if rank != place.rank})
    for number in tie.stages:
        if not known[number]:
            continue
        if rank_of[number] == place.rank:
            packed = torch.stack([_local(share[number][m]) for m in known[number]]).contiguous()
            operations += [dist.P2POp(dist.isend, packed, group=place.group, group_peer=other) for other in others]
        else:
            like = _local(next(iter(parameters.values())))
            arriving[number] = torch.empty((len(known[number]), *like.shape), dtype=like.dtype, device=like.device)
            peer = rank_of[number]
            operations.append(dist.P2POp(dist.irecv, arriving[number], group=place.group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
    for number, packed in arriving.items():
        share[number] = dict(zip(known[number], packed.unbind(), strict=True))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _add_up(share: Mapping[int, Units], parameters: Mapping[int, nn.Parameter]) -> None:
    numbers = sorted({microbatch for units in share.values() for microbatch in units})
    kept = {id(parameter): parameter for parameter in parameters.values()}
    for microbatch in numbers:
        parts = [_local(share[s][microbatch]) for s in sorted(share, reverse=True) if microbatch in share[s]]
        result = parts[0].clone()
        for part in parts[1:]:
            result += part
        for parameter in kept.values():
            add_gradient(parameter, _as_gradient(result.clone(), parameter))


def _as_gradient(local: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return local
