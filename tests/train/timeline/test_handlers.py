import logging

from vescale_train.timeline.handlers import LogLines


def test_a_flush_is_logged_by_name_the_longest_first(caplog, span):
    caplog.set_level(logging.INFO)
    LogLines(logging.getLogger("times"))(
        [span("forward", 0, 0, 2), span("forward", 0, 2, 6), span("backward", 0, 6, 16)]
    )
    assert [record.getMessage() for record in caplog.records] == [
        "rank 0: backward: 1 times, 10.000 ms in all, 10.000 ms at most",
        "rank 0: forward: 2 times, 6.000 ms in all, 4.000 ms at most",
    ]


def test_the_level_is_the_caller_s(caplog, span):
    caplog.set_level(logging.INFO)
    LogLines(level=logging.DEBUG)([span("forward", 0, 0, 2)])
    assert not caplog.records
