"""Private names of torch's pipelining that schedules use: its named orders, and the passes that write out messages.

Kept in one file, with a version test, so that a new torch is one file's work. Rows cross this border as
``Instruction`` values; torch's own action type does not leave this file and the runtime's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
)

from vescale_train.pipe.schedules.instruction import BUILT_IN, Instruction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UserKind", "from_action", "named_order", "to_action", "write_out"]

_TORCH_KINDS = frozenset(kind.name for kind in BUILT_IN)


class UserKind(str):
    """A kind that torch does not know, in the place of its computation type; torch's passes leave it where it is."""

    __slots__ = ()

    @property
    def value(self) -> str:
        """The name, as torch's enumeration has it."""
        return str(self)


def to_action(instruction: Instruction) -> _Action:
    """Return torch's form of an instruction."""
    known = instruction.kind in _TORCH_KINDS
    kind: Any = _ComputationType(instruction.kind) if known else UserKind(instruction.kind)
    parts = tuple(to_action(part) for part in instruction.parts) or None
    return _Action(instruction.stage, kind, instruction.microbatch, parts)


def from_action(action: _Action) -> Instruction:
    """Return our form of torch's action."""
    parts = tuple(from_action(part) for part in action.sub_actions or ())
    return Instruction(action.stage_index, str(action.computation_type.value), action.microbatch_index, parts)


def named_order(
    class_name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> list[list[Instruction | None]]:
    """Return the computations of every rank in the order of one of torch's schedule classes.

    Raises:
        ValueError: torch cannot make this schedule for these numbers.
    """
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=None, stage_index=index
        )
        for index in range(stages_per_rank)
    ]
    made = getattr(torch_schedules, class_name)(stages, num_microbatches)
    return [
        [None if action is None else from_action(action) for action in made.pipeline_order[rank]]
        for rank in range(num_ranks)
    ]


def write_out(
    rows: Sequence[Sequence[Instruction | None]],
    *,
    stage_rank: Callable[[int], int],
    num_stages: int,
    num_microbatches: int,
    unshard: bool,
) -> list[list[Instruction]]:
    """Add sends, receives, reductions and, if asked, gathering of weights to rows of computations.

    Raises:
        AssertionError: the rows cannot be run; validate first.
    """
    lowered: dict[int, Any] = {}
    for rank, row in enumerate(rows):
        actions: list[Any] = [None if cell is None else to_action(cell) for cell in row]
        gathered: Any = _add_unshard_reshard(actions) if unshard else actions
        lowered[rank] = _add_reduce_grad(gathered, num_microbatches)
    complete = _add_send_recv(lowered, stage_to_rank=stage_rank, num_stages=num_stages)
    return [[from_action(action) for action in complete[rank]] for rank in range(len(rows))]
