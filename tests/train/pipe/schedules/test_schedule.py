from __future__ import annotations

import pytest

from vescale_train.errors import ConfigError
from vescale_train.pipe.schedules import Schedule, named_schedule, schedule_from_text, with_communication


@pytest.mark.parametrize("kind", ["gpipe", "zero_bubble", "dualpipe_v"])
def test_text_and_back_gives_the_same_schedule(kind):
    schedule = named_schedule(kind, num_ranks=2, num_microbatches=4, stages_per_rank=1 if kind == "gpipe" else 2)
    for each in (schedule, with_communication(schedule, unshard=True)):
        assert schedule_from_text(each.csv(), name=kind) == each


def test_ranges_comments_spaces_and_idle_steps():
    schedule = schedule_from_text(
        """
        # two ranks, GPipe
        0F0..2, 0B0 0B1 0B2    # the first stage
        , 1F0..2, 1B0..2
        """
    )
    assert [str(i) for i in schedule.instructions(0)] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert schedule.rows[1][0] is None
    assert schedule.num_microbatches == 3
    assert not schedule.forward_only


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the text has no instruction"),
        ("# nothing\n,,", "the text has no instruction"),
        ("0F0\n1G-1", "line 2 of the schedule: cannot read instruction '1G-1'"),
        ("0F3..1", "the range 3..1 is empty"),
        ("F0", "expected STAGE KIND"),
    ],
)
def test_text_that_cannot_be_read_says_where(text, reason):
    with pytest.raises(ConfigError, match=reason):
        schedule_from_text(text)


def test_a_schedule_needs_ranks_stages_and_micro_batches():
    with pytest.raises(ConfigError, match="all must be at least 1"):
        Schedule(rows=(), num_stages=1, num_microbatches=1)
