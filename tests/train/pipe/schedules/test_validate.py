"""Wrong schedules are refused with the reason, right ones are not, and the walk agrees with a plain oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.pipe.errors import ScheduleError
from vescale_train.pipe.schedules import (
    Sharding,
    in_flight,
    named_schedule,
    schedule_from_text,
    validate_pipeline_schedule,
    with_communication,
)

RIGHT = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
SPLIT = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"
COMMS = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD\n"
)
SHARDED = "0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD\n1UNSHARD,1F0,1B0,1F1,1B1,1RESHARD\n"
LOOPED = "0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0\n"
OVERLAP = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"

WRONG = {
    "too few ranks": (RIGHT, {"num_ranks": 4}, "has 2 ranks, but there are 4"),
    "too few stages": (RIGHT, {"num_stages": 4}, "has 2 stages, but there are 4"),
    "other number of micro-batches": (RIGHT, {"num_microbatches": 3}, "has 2 micro-batches, but there are 3"),
    "unknown instruction": (RIGHT.replace("0B1", "0B1,0JUMP1"), {}, "nobody has registered an instruction JUMP"),
    "stage out of range": (RIGHT.replace("1F1", "7F1"), {"stages": 2}, "there is no stage 7; stages are 0 to 1"),
    "micro-batch out of range": (RIGHT.replace("0F1", "0F9"), {"micro": 2}, "there is no micro-batch 9"),
    "micro-batch missing": (RIGHT.replace("0F1", "0F"), {}, "F needs a micro-batch"),
    "micro-batch too much": (COMMS.replace("0REDUCE_GRAD", "0REDUCE_GRAD1"), {}, "REDUCE_GRAD takes no micro-batch"),
    "stage on two ranks": (RIGHT.replace("1F1", "0F1"), {}, "stage 0 is on rank 0 and on rank 1"),
    "stage on no rank": (RIGHT, {"stages": 3}, "stage 2 is on no rank"),
    "rank without a stage": (RIGHT + "\n,,\n", {}, "rank 2 has no stage"),
    "forward missing": (RIGHT.replace("0F1,", ""), {}, "rank 0, stage 0, micro-batch 1: no forward"),
    "forward twice": (RIGHT.replace("0F1", "0F1,0F1"), {}, "2 forwards; its activations would be overwritten"),
    "backward missing": (RIGHT.replace(",1B1", ""), {}, "rank 1, stage 1, micro-batch 1: no backward"),
    "backward twice": (RIGHT.replace("1B0", "1B0,1B0"), {}, "2 times B; gradients would be counted twice"),
    "whole and split backward": (RIGHT.replace("0B1", "0B1,0I1,0W1"), {}, "a whole backward (B) and a split one"),
    "weights left out": (SPLIT.replace(",0W1", ""), {}, "I without W; its weights would get no gradient"),
    "weights from nothing": (SPLIT.replace("0I1,", ""), {}, "W without I; there is nothing to compute it from"),
    "weights twice": (SPLIT.replace("0W1", "0W1,0W1"), {}, "2 times W"),
    "weights before inputs": (SPLIT.replace("0I1,0W1", "0W1,0I1"), {}, "W comes before I"),
    "backward before forward": (RIGHT.replace("0F1,0B0,0B1", "0B1,0F1,0B0"), {}, "B comes before F"),
    "input part before forward": (SPLIT.replace("1F1,1I1", "1I1,1F1"), {}, "I comes before F"),
    "deadlock between two ranks": (
        "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n",
        {},
        "(0B0) waits for 1B0 on rank 1, which never comes to it",
    ),
    "deadlock on one rank": (LOOPED.replace("0F0,2F0", "2F0,0F0"), {}, "(2F0) waits for 1F0 on rank 1"),
    "overlap of two forwards": (OVERLAP.replace("0B0)", "0F1)"), {}, "an overlap is one forward and one backward"),
    "overlap of what waits for each other": (OVERLAP.replace("0F1;0B0", "0F0;0B0"), {}, "of different micro-batches"),
    "overlap with a weight part": (OVERLAP.replace("0B0)", "0W0)"), {}, "only F, B and I can be parts"),
    "parts in a plain instruction": (OVERLAP.replace("OVERLAP_F_B", "F"), {}, "F cannot have parts"),
    "send without receive": (COMMS.replace("1RECV_F1,", ""), {}, "0SEND_F1 has no 1RECV_F1 on rank 1"),
    "receive without send": (COMMS.replace("1SEND_B0,", ""), {}, "0RECV_B0 has no 1SEND_B0 on rank 1"),
    "sent twice": (COMMS.replace("0SEND_F1", "0SEND_F1,0SEND_F1"), {}, "0SEND_F1 stands 2 times"),
    "send before its computation": (COMMS.replace("0F1,0SEND_F1", "0SEND_F1,0F1"), {}, "0SEND_F1 comes before 0F1"),
    "computation before its receive": (COMMS.replace("1RECV_F1,1F1", "1F1,1RECV_F1"), {}, "1F1 comes before 1RECV_F1"),
    "send into nothing": (COMMS.replace("1F1,", "1F1,1SEND_F1,"), {}, "1SEND_F1 has nobody at its other end"),
    "send to itself": (
        "0F0,0SEND_F0,1RECV_F0,1F0,1B0,1SEND_B0,0RECV_B0,0B0\n",
        {},
        "between two stages of the same rank",
    ),
    "messages that cross": (
        COMMS.replace("0RECV_B0,0B0,0RECV_B1,0B1", "0RECV_B1,0RECV_B0,0B0,0B1"),
        {},
        "message 0 from rank 1 to rank 0 is 1SEND_B0, but rank 0 takes it for 1SEND_B1",
    ),
    "reduced before the last backward": (
        COMMS.replace("0B1,0REDUCE_GRAD", "0REDUCE_GRAD,0B1"),
        {},
        "its gradients are reduced before 0B1",
    ),
    "reduced twice": (COMMS.replace("1REDUCE_GRAD", "1REDUCE_GRAD,1REDUCE_GRAD"), {}, "are reduced 2 times"),
    "never reduced": (COMMS.replace(",1REDUCE_GRAD", ""), {}, "its gradients are never reduced"),
    "computed on freed weights": (
        SHARDED.replace("0B0,0B1,0RESHARD", "0RESHARD,0B0,0B1"),
        {},
        "that are not gathered",
    ),
    "gathered twice": (SHARDED.replace("0F1", "0UNSHARD,0F1"), {}, "its weights are gathered twice"),
    "freed twice": (SHARDED + "0RESHARD", {}, "freed without having been gathered"),
    "split backward with resharding": (
        SPLIT,
        {"sharding": Sharding(fsdp=True, reshard_after_forward=True)},
        "wrong or missing gradients",
    ),
    "split backward with torch's DDP": (SPLIT, {"sharding": Sharding(ddp=True)}, "which then never reduces"),
    "several stages a rank with torch's DDP": (LOOPED, {"sharding": Sharding(ddp=True)}, "fails in its second step"),
    "too many activations": (RIGHT, {"max_in_flight": 1}, "rank 0 keeps the activations of 2 forwards at once"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_schedule_is_refused_with_the_reason(case):
    text, options, reason = WRONG[case]
    text = text.replace("1RESHARD\n0RESHARD", "1RESHARD,1RESHARD")
    schedule = schedule_from_text(
        text, num_stages=options.pop("stages", None), num_microbatches=options.pop("micro", None)
    )
    with pytest.raises(ScheduleError) as caught:
        validate_pipeline_schedule(schedule, **options)
    assert any(reason in problem for problem in caught.value.problems), caught.value.problems
    assert all(problem in str(caught.value) for problem in caught.value.problems)


@pytest.mark.parametrize("text", [RIGHT, SPLIT, COMMS, SHARDED, LOOPED, OVERLAP])
def test_the_schedules_that_were_spoilt_are_right(text):
    validate_pipeline_schedule(schedule_from_text(text))


@pytest.mark.parametrize("sharding", [Sharding(fsdp=True), Sharding()])
def test_split_backward_is_allowed_where_torch_gets_it_right(sharding):
    validate_pipeline_schedule(schedule_from_text(SPLIT), sharding=sharding)


def test_whole_backward_is_allowed_with_every_wrapping():
    validate_pipeline_schedule(
        schedule_from_text(RIGHT), sharding=Sharding(fsdp=True, reshard_after_forward=True, ddp=True)
    )


def test_forward_only_schedules_have_no_backward():
    schedule = schedule_from_text("0F0,0F1\n1F0,1F1\n")
    assert schedule.forward_only
    validate_pipeline_schedule(schedule)
    with pytest.raises(ScheduleError, match="a backward in a schedule that only runs forward"):
        validate_pipeline_schedule(
            type(schedule)(
                rows=schedule_from_text("0F0,0B0\n1F0,1B0\n").rows, num_stages=2, num_microbatches=1, forward_only=True
            )
        )


def test_everything_wrong_is_told_at_once():
    with pytest.raises(ScheduleError) as caught:
        validate_pipeline_schedule(schedule_from_text("0F0,0F1,0B0,0B0\n1F0,1I1,1W1,1F1\n"))
    assert len(caught.value.problems) == 4


def _runs(rows, last) -> bool:
    """Run rows of F and B by trial and error, with nothing in common with the code under test."""
    done: set[tuple[str, int, int]] = set()
    rows = [list(row) for row in rows]
    while any(rows):
        for row in rows:
            if not row:
                continue
            kind, stage, number = row[0]
            need = ("F", stage - 1, number) if kind == "F" else ("B", stage + 1, number)
            ends = stage == (0 if kind == "F" else last)
            if (ends or need in done) and (kind == "F" or ("F", stage, number) in done):
                done.add(row.pop(0))
                break
        else:
            return False
    return True


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_any_order_of_the_right_work_is_refused_exactly_if_it_cannot_end(data, num_ranks, num_microbatches, loops):
    num_stages = num_ranks * loops
    rows = []
    for rank in range(num_ranks):
        work = [(k, s, m) for s in range(rank, num_stages, num_ranks) for m in range(num_microbatches) for k in "FB"]
        rows.append(data.draw(st.permutations(work) | st.just(sorted(work, key=lambda w: (w[0] == "B", w[1], w[2])))))
    text = "\n".join(",".join(f"{stage}{kind}{number}" for kind, stage, number in row) for row in rows)
    schedule = schedule_from_text(text)
    if _runs(rows, num_stages - 1):
        validate_pipeline_schedule(schedule)
        validate_pipeline_schedule(with_communication(schedule, unshard=True))
    else:
        with pytest.raises(ScheduleError, match=r"deadlock|comes before"):
            validate_pipeline_schedule(schedule)


def test_1f1b_holds_no_more_activations_than_stages_lie_ahead():
    assert in_flight(named_schedule("1f1b", num_ranks=4, num_microbatches=8)) == [4, 3, 2, 1]
    assert in_flight(named_schedule("gpipe", num_ranks=4, num_microbatches=8)) == [8] * 4
