"""The private names of torch that schedules stand on are there and do what they did in the version pinned."""

from __future__ import annotations

import torch

from vescale_train.pipe.schedules import parse_instructions
from vescale_train.pipe.torch_schedules import UserKind, from_action, named_order, to_action, write_out


def test_torch_is_the_version_that_this_was_written_for():
    assert torch.__version__.startswith("2.13."), "read torch_schedules.py and torch_stage.py against the new torch"


def test_actions_cross_the_border_unchanged():
    for text in ("2F0", "1REDUCE_GRAD", "0RECV_B3", "(0F3;1B2)OVERLAP_F_B", "3LOG1"):
        (instruction,) = parse_instructions(text)
        action = to_action(instruction)
        assert str(action) == text
        assert from_action(action) == instruction
    assert UserKind("LOG").value == "LOG"


def test_torchs_order_is_the_one_that_is_known():
    rows = named_order("ScheduleInterleavedZeroBubble", 2, 1, 2)
    assert [",".join(str(cell) for cell in row if cell) for row in rows] == [
        "0F0,0F1,0I0,0W0,0I1,0W1",
        "1F0,1I0,1F1,1I1,1W0,1W1",
    ]


def test_torch_writes_out_communication():
    rows = [
        parse_instructions("0F0") + parse_instructions("0B0"),
        parse_instructions("1F0") + parse_instructions("1B0"),
    ]
    complete = write_out(rows, stage_rank=lambda stage: stage, num_stages=2, num_microbatches=1, unshard=True)
    assert [",".join(map(str, row)) for row in complete] == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD",
        "1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD",
    ]
