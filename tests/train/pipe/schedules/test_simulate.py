from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_train.pipe.errors import ScheduleError
from vescale_train.pipe.schedules import Costs, named_schedule, schedule_from_text, simulate, with_communication


@given(st.integers(1, 6), st.integers(1, 9))
def test_gpipe_and_1f1b_have_the_bubble_of_the_textbook(num_ranks, num_microbatches):
    for kind in ("gpipe", "1f1b"):
        forecast = simulate(named_schedule(kind, num_ranks=num_ranks, num_microbatches=num_microbatches))
        assert forecast.seconds == 3 * (num_microbatches + num_ranks - 1)
        assert forecast.bubble == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1))


def test_costs_of_single_stages_and_of_sends_count():
    schedule = named_schedule("gpipe", num_ranks=2, num_microbatches=1)
    costs = Costs(forward=(1.0, 2.0), backward_input=(3.0, 4.0), backward_weight=(5.0, 6.0), send=0.5)
    for each in (schedule, with_communication(schedule)):
        forecast = simulate(each, costs)
        assert forecast.seconds == 1 + 0.5 + 2 + 10 + 0.5 + 8
        assert forecast.busy_seconds == (9.0, 12.0)


def test_peak_memory_counts_what_is_held_and_what_stays():
    costs = Costs(activation_bytes=(10.0, 20.0), fixed_bytes=(100.0, 200.0), held_after_input=0.25)
    assert simulate(named_schedule("1f1b", num_ranks=2, num_microbatches=4), costs).peak_bytes == (120.0, 220.0)
    split = schedule_from_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    assert simulate(split, costs).peak_bytes == (120.0, 225.0)


def test_no_rank_does_two_things_at_once_and_nothing_starts_before_what_it_needs():
    schedule = named_schedule("dualpipe_v", num_ranks=4, num_microbatches=8, stages_per_rank=2)
    spans = simulate(schedule, Costs(forward=1.3, backward_input=0.7, send=0.2)).spans
    for rank in range(4):
        own = sorted((span.start, span.end) for span in spans if span.rank == rank)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))
    ends = {str(span.instruction): span.end for span in spans}
    for span in spans:
        if span.instruction.kind == "F" and span.instruction.stage:
            assert span.start >= ends[f"{span.instruction.stage - 1}F{span.instruction.microbatch}"]


def test_a_schedule_that_never_ends_has_no_forecast():
    with pytest.raises(ScheduleError, match="does not come to its end"):
        simulate(schedule_from_text("0F0,0B0\n1B0,1F0\n"))
