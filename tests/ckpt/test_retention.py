from __future__ import annotations

import pytest

from vescale_ckpt.errors import ConfigError
from vescale_ckpt.retention import SUPERSEDED_SECONDS, RetentionPolicy, StepInfo, plan_prune

NOW = 1e6


def steps(*numbers: int, at: float = 0.0) -> list[StepInfo]:
    """Return steps that were committed in this order."""
    return [StepInfo(number, (1,), at + place) for place, number in enumerate(numbers)]


def kept(infos, keep_last, keep_every=None, keep_steps=()) -> list[int]:
    policy = RetentionPolicy(keep_last=keep_last, keep_every=keep_every)
    plan = plan_prune("run", infos, policy, now=NOW, keep_steps=keep_steps)
    assert sorted([*plan.deleted, *(each.step for each in plan.kept)]) == sorted(info.step for info in infos)
    return [each.step for each in plan.kept]


def test_the_last_by_number_and_not_as_text():
    assert kept(steps(*range(9000, 10001, 100)), 10) == list(range(9100, 10001, 100))
    assert kept(steps(9, 10, 100, 1000), 2) == [100, 1000]


def test_the_order_of_the_listing_does_not_matter():
    infos = steps(1, 2, 3, 4, 5)
    assert kept(infos[::-1], 2) == kept(infos, 2) == [4, 5]


def test_a_run_that_was_set_back_loses_neither_what_it_has_just_saved_nor_where_it_was():
    assert kept(steps(500, 600, 700, 100), 3) == [100, 500, 600, 700]
    assert kept(steps(500, 600, 700, 510, 520, 530, 540), 3) == [520, 530, 540, 600, 700]
    assert kept(steps(500, 600, 700, 100), 1) == [100, 700]


def test_every_nth_stays():
    assert kept(steps(0, 500, 1000, 1500, 2000, 2100), 1, 1000) == [0, 1000, 2000, 2100]


def test_tagged_ones_and_those_asked_for_stay():
    infos = [*steps(1, 2), StepInfo(3, (1,), 3.0, ("best",)), *steps(4, 5, at=4.0)]
    assert kept(infos, 1) == [3, 5]
    assert kept(infos, 1, keep_steps=(1, 99)) == [1, 3, 5]


def test_the_reasons_are_told():
    infos = [StepInfo(10, (1,), 1.0, ("a", "b")), *steps(20, 30, at=2.0)]
    plan = plan_prune("run", infos, RetentionPolicy(keep_last=1, keep_every=10), now=NOW, keep_steps=(20,))
    assert {each.step: each.reasons for each in plan.kept} == {
        10: ("every", "tagged a", "tagged b"),
        20: ("every", "asked for"),
        30: ("newest", "last", "every"),
    }


def test_older_versions_go_when_nobody_can_be_waiting_for_them():
    infos = [
        StepInfo(1, (1, 2, 5), NOW - SUPERSEDED_SECONDS),
        StepInfo(2, (1, 2), NOW - SUPERSEDED_SECONDS + 1),
        StepInfo(3, (1, 2), 0.0, ("best",)),
        StepInfo(4, (1, 2), 0.0),
    ]
    plan = plan_prune("run", infos, RetentionPolicy(keep_last=2), now=NOW)
    assert plan.deleted == ()
    assert plan.superseded == ((1, 1), (1, 2), (4, 1))
    plan = plan_prune("run", [*infos[:1], *steps(7, 8, at=NOW)], RetentionPolicy(keep_last=1), now=NOW)
    assert (plan.deleted, plan.superseded) == ((1, 7), ()), "a step that goes takes all its versions along"


def test_an_empty_run_has_nothing_to_keep():
    plan = plan_prune("run", [], RetentionPolicy(keep_last=1), now=NOW)
    assert (plan.kept, plan.deleted, plan.superseded) == ((), (), ())


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_numbers_that_could_take_the_newest_are_refused(value):
    with pytest.raises(ConfigError, match="keep_last"):
        RetentionPolicy(keep_last=value)
    with pytest.raises(ConfigError, match="keep_every"):
        RetentionPolicy(keep_last=1, keep_every=value)


def test_arguments_as_a_policy():
    assert RetentionPolicy.of(None, None) is None
    assert RetentionPolicy.of(3, 100) == RetentionPolicy(keep_last=3, keep_every=100)
    with pytest.raises(ConfigError, match="without keep_last"):
        RetentionPolicy.of(None, 100)
