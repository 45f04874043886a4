"""Private names of torch's pipelining that running uses: its stage base class and its runtime.

Kept in one file, with a version test, so that a new torch is one file's work. torch's runtime walks the written-out
schedule, gathers and frees fully sharded weights, and calls the stage; the stage here replaces what torch's own does
with shapes and messages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import _PipelineStageBase

from vescale_train.errors import InternalError
from vescale_train.pipe.schedules.instruction import handler_of
from vescale_train.pipe.torch_schedules import UserKind, from_action, to_action

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vescale_train.pipe.schedules import Schedule

__all__ = ["Runtime", "StageBase", "own_group"]


class StageBase(_PipelineStageBase):
    """torch's stage with its shape inference taken out."""

    def __init__(
        self,
        module: nn.Module,
        *,
        index: int,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(module, index, num_stages, device, group)

    def _prepare_forward_infra(self, *_args: Any, **_kwargs: Any) -> None:
        raise InternalError("this stage learns shapes from messages")

    def _prepare_backward_infra(self, *_args: Any, **_kwargs: Any) -> None:
        raise InternalError("this stage learns shapes from messages")

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:  # noqa: ARG002 - torch's signature
        raise InternalError("this stage learns shapes from messages")

    def differentiate(self, kind: str, arguments: dict[str, Any], *, last: bool) -> tuple[Any, Any]:
        """Run one kind of backward (``full``, ``input``, ``weight``) as the wrapping of the module asks for it."""
        return self.backward_maybe_with_nosync(kind, arguments, last_backward=last)

    def reduce_wrapped(self) -> None:
        """Let a fully sharded module reduce the gradients that it has put off."""
        super().perform_reduce_grad(1)


class Runtime(_PipelineScheduleRuntime):
    """torch's runtime for a schedule that has been proved and written out."""

    def __init__(self, stages: list[Any], schedule: Schedule, context: Any) -> None:
        super().__init__(stages, schedule.num_microbatches, loss_fn=None, scale_grads=False)  # type: ignore[no-untyped-call]
        self._has_backward = not schedule.forward_only
        ranks = schedule.stage_ranks()
        self.stage_index_to_group_rank = ranks
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        self.pipeline_order_with_comms = {
            rank: [to_action(cell) for cell in row if cell is not None] for rank, row in enumerate(schedule.rows)
        }
        for name in schedule.kinds():
            if handler_of(name) is not None:
                functions: dict[Any, Any] = self._comp_type_to_function_map
                functions[UserKind(name)] = lambda action, _: _call_user(action, context)

    def run(self) -> None:
        """Run the schedule once."""
        for stage in self._stages:
            stage.has_backward = self._has_backward
        self.unsharded_stages.clear()
        self._step_microbatches()

    def _initialize_stages(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: stages are ready."""

    def _maybe_compute_loss(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the stage has computed it."""

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> torch.Tensor | None:
        return stage.loss_of(mb_index) if stage.is_last else None

    def _update_losses(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the engine collects them."""


def _call_user(action: Any, context: Any) -> None:
    instruction = from_action(action)
    handler = handler_of(instruction.kind)
    if handler is None:
        raise InternalError(f"instruction {instruction} was forgotten after the schedule was made")
    handler(instruction, context)


def own_group() -> ProcessGroup:
    """Return a group of this process alone; torch's stage asks a group for its rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    everyone = dist.group.WORLD
    if everyone is not None and dist.get_world_size() == 1:
        return everyone
    singles = [[rank] for rank in range(dist.get_world_size())]
    alone: ProcessGroup = dist.new_subgroups_by_enumeration(singles)[0]  # type: ignore[no-untyped-call]
    return alone
