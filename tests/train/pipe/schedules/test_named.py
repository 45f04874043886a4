from __future__ import annotations

import pytest

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules import (
    PipelineScheduleType,
    named_schedule,
    simulate,
    validate_pipeline_schedule,
    with_communication,
)
from vescale_train.pipe.schedules.named import placement_of, rank_of_stage

ONE_STAGE = {PipelineScheduleType.GPIPE, PipelineScheduleType.SIMPLE_1F1B}


def made(kind, num_ranks, num_microbatches):
    return named_schedule(
        kind,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=1 if kind in ONE_STAGE else 2,
    )


@pytest.mark.parametrize("kind", PipelineScheduleType)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 4), (4, 8), (3, 6), (8, 16)])
def test_every_named_schedule_is_right_with_and_without_its_communication(kind, num_ranks, num_microbatches):
    schedule = made(kind, num_ranks, num_microbatches)
    assert schedule.num_ranks == num_ranks
    for unshard in (False, True):
        complete = with_communication(schedule, unshard=unshard)
        validate_pipeline_schedule(complete)
        assert complete.has_comms == (num_ranks > 1)
        assert {"UNSHARD", "RESHARD"} <= complete.kinds() if unshard else "UNSHARD" not in complete.kinds()
        assert simulate(complete).seconds == simulate(schedule).seconds


@pytest.mark.parametrize("kind", PipelineScheduleType)
def test_stages_lie_where_the_placement_says(kind):
    schedule = made(kind, 4, 8)
    ranks = schedule.stage_ranks()
    assert [ranks[stage] for stage in range(schedule.num_stages)] == [
        rank_of_stage(stage, 4, placement_of(kind)) for stage in range(schedule.num_stages)
    ]


@pytest.mark.parametrize("kind", PipelineScheduleType)
def test_forward_only_forms_place_stages_alike(kind):
    training = made(kind, 2, 4)
    forward = named_schedule(
        kind,
        num_ranks=2,
        num_microbatches=3,
        stages_per_rank=1 if kind in ONE_STAGE else 2,
        forward_only=True,
    )
    assert forward.forward_only
    assert forward.kinds() == {"F"}
    assert forward.stage_ranks() == training.stage_ranks()


def test_zero_bubble_schedules_split_and_have_less_bubble():
    plain = simulate(made("1f1b", 4, 8)).bubble
    assert plain == pytest.approx(3 / 11)
    for kind in ("zero_bubble", "zbv", "dualpipe_v"):
        schedule = made(kind, 4, 8)
        assert schedule.splits_backward
        assert simulate(schedule).bubble < plain / 2


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("gipe", {}, "the names are gpipe, 1f1b"),
        ("1f1b", {"stages_per_rank": 2}, "with 2 stages a rank: it has 1"),
        ("zbv", {"stages_per_rank": 1}, "with 1 stages a rank: it has 2"),
        ("interleaved_1f1b", {"stages_per_rank": 2, "num_microbatches": 5}, "with 5 micro-batches on 2 ranks"),
        ("dualpipe_v", {"stages_per_rank": 2, "num_microbatches": 3}, "at least as many microbatches as stages"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused_with_what_does(kind, options, reason):
    with pytest.raises(ConfigError, match=reason):
        named_schedule(kind, **{"num_ranks": 2, "num_microbatches": 4} | options)


def test_fewer_micro_batches_than_stages_still_end():
    for kind in ("gpipe", "1f1b"):
        validate_pipeline_schedule(with_communication(named_schedule(kind, num_ranks=4, num_microbatches=1)))


def test_a_schedule_with_communication_stays_as_it_is():
    complete = with_communication(made("1f1b", 2, 4))
    assert with_communication(complete) is complete
