from __future__ import annotations

import pytest

from vescale_train.errors import ConfigError
from vescale_train.pipe import PipelineParallelPlan, PipelineScheduleType, named_schedule


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_microbatches": 0}, "num_microbatches is 0"),
        ({"virtual_chunks": 0}, "virtual_chunks is 0"),
        ({"loss_reduction": "median"}, "use 'mean' or 'sum'"),
        ({"split_method": "nowhere"}, "use manual, uniform"),
        ({"mode": "guess"}, "use fqn, trace, manual"),
        ({"split_method": "manual"}, "they belong together"),
        ({"split_points": ("layers.1",)}, "they belong together"),
        ({"costs": (1.0,)}, "costs are only used by split_method='auto'"),
        ({"schedule_type": "fastest"}, "use gpipe, 1f1b"),
    ],
)
def test_plans_that_make_no_sense_are_refused_when_they_are_made(options, reason):
    with pytest.raises(ConfigError, match=reason):
        PipelineParallelPlan(**{"num_microbatches": 4} | options).stages_per_rank()


def test_a_number_of_stages_that_does_not_fit_the_ranks_is_refused():
    plan = PipelineParallelPlan(num_microbatches=4, num_stages=3)
    with pytest.raises(ConfigError, match="num_stages is 3, but 1 ranks x 1 stages a rank are 1"):
        plan.stage_count(1)
    assert PipelineParallelPlan(num_microbatches=4, num_stages=3).stage_count(3) == 3


@pytest.mark.parametrize("kind", PipelineScheduleType)
def test_stages_are_placed_as_the_schedule_places_them(kind):
    plan = PipelineParallelPlan(num_microbatches=8, schedule_type=kind)
    schedule = plan.schedule(2)
    assert schedule.num_stages == plan.stage_count(2)
    assert {stage: plan.rank_of(stage, 2) for stage in range(schedule.num_stages)} == schedule.stage_ranks()
    assert plan.schedule(2, forward_only=True).kinds() == {"F"}


def test_a_schedule_of_ones_own_says_where_stages_lie():
    text = "1F0,1B0\n0F0,0B0\n"
    for given in (text, named_schedule("1f1b", num_ranks=2, num_microbatches=1)):
        plan = PipelineParallelPlan(num_microbatches=1, schedule_type=given)
        assert plan.stage_count(2) == 2
        assert plan.rank_of(0, 2) == (1 if given == text else 0)
        assert plan.schedule(2, forward_only=True).kinds() == {"F"}
