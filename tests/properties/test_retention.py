"""Retention over runs of any order: the newest always stays, and a smaller policy never keeps more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt.retention import RetentionPolicy, StepInfo, plan_prune

NUMBERS = st.lists(st.integers(0, 10**12 - 1), min_size=1, max_size=30, unique=True)
TAGS = st.sets(st.integers(0, 29))
LAST = st.integers(1, 40)
EVERY = st.none() | st.integers(1, 50)


def infos_of(numbers, tagged):
    """Return steps committed in the order of the list."""
    return [
        StepInfo(number, (1,), float(place), ("tag",) if place in tagged else ())
        for place, number in enumerate(numbers)
    ]


def kept(infos, last, every):
    plan = plan_prune("run", infos, RetentionPolicy(keep_last=last, keep_every=every), now=1e9)
    stay = {each.step for each in plan.kept}
    assert stay.isdisjoint(plan.deleted)
    assert stay | set(plan.deleted) == {info.step for info in infos}
    assert list(plan.deleted) == sorted(plan.deleted)
    return stay


@given(NUMBERS, TAGS, LAST, EVERY)
def test_what_the_words_say(numbers, tagged, last, every):
    stay = kept(infos_of(numbers, tagged), last, every)
    expected = set(sorted(numbers)[-last:]) | set(numbers[-last:])
    expected |= {number for place, number in enumerate(numbers) if place in tagged}
    if every is not None:
        expected |= {number for number in numbers if number % every == 0}
    assert stay == expected
    assert max(numbers) in stay
    assert numbers[-1] in stay, "nothing just written is pruned"
    assert len(stay) >= min(last, len(numbers))


@given(NUMBERS, TAGS, LAST, EVERY, st.randoms())
def test_the_order_of_a_listing_means_nothing(numbers, tagged, last, every, random):
    infos = infos_of(numbers, tagged)
    shuffled = random.sample(infos, len(infos))
    assert kept(infos, last, every) == kept(shuffled, last, every)


@given(NUMBERS, TAGS, LAST, LAST)
def test_keeping_more_keeps_all_that_keeping_less_keeps(numbers, tagged, a, b):
    infos = infos_of(numbers, tagged)
    assert kept(infos, min(a, b), None) <= kept(infos, max(a, b), None)


@given(NUMBERS, TAGS, LAST, EVERY)
def test_pruning_again_changes_nothing(numbers, tagged, last, every):
    infos = infos_of(numbers, tagged)
    stay = kept(infos, last, every)
    left = [info for info in infos if info.step in stay]
    assert kept(left, last, every) == stay
