from vescale_train.timeline.meetings import meetings_of


def test_the_nth_span_with_a_link_meets_the_nth_of_other_ranks(span):
    spans = [
        span("reduce", 0, 0, 5, link="grads"),
        span("reduce", 1, 3, 5, link="grads"),
        span("reduce", 1, 7, 9, link="grads"),
        span("reduce", 0, 8, 9, link="grads"),
        span("reduce", 0, 9, 10, link="alone"),
        span("forward", 1, 0, 3),
    ]
    first, second = meetings_of(spans)
    assert set(map(id, first.spans)) == {id(spans[0]), id(spans[1])}
    assert first.last is spans[1]
    assert second.last is spans[3]


def test_a_step_that_a_rank_lacks_shifts_nothing(span):
    spans = [span("reduce", 0, step, step + 1, link="g", step=step) for step in (1, 2)]
    spans.append(span("reduce", 1, 2, 3, link="g", step=2))
    (meeting,) = meetings_of(spans)
    assert {one.step for one in meeting.spans} == {2}
