import pytest

from vescale_train.errors import ConfigError
from vescale_train.metrics.meter import Meter


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run(meter, clock, seconds, *, tokens=1000):
    readings = []
    for step, took in enumerate(seconds, 1):
        clock.now += took
        readings.append(meter.update(step=step, loss=2.0, tokens=tokens))
    return readings


def test_the_first_step_only_starts_the_clock(clock):
    first, second, third = run(Meter(clock=clock, num_steps=5), clock, [60, 2, 4])
    assert (first.tokens_per_second, first.step_seconds, first.mfu, first.seconds_left) == (0, 0, None, None)
    assert (second.tokens_per_second, second.step_seconds, second.seconds_left) == (500, 2, 6)
    assert (third.tokens_per_second, third.step_seconds, third.seconds_left) == (pytest.approx(1000 / 3), 3, 6)


def test_only_the_window_counts(clock):
    last = run(Meter(clock=clock, window=2), clock, [1, 100, 100, 2, 2])[-1]
    assert last.step_seconds == 2
    assert last.tokens_per_second == 500


def test_mfu_is_of_all_ranks(clock):
    meter = Meter(clock=clock, flops_per_token=6e6, peak_flops=1e9, num_ranks=4)
    assert run(meter, clock, [1, 2])[-1].mfu == pytest.approx(6e6 * 500 / 4e9)
    for unknown in ({"flops_per_token": 6e6}, {"peak_flops": 1e9}):
        assert run(Meter(clock=clock, **unknown), clock, [1, 2])[-1].mfu is None


def test_a_clock_that_stands_still_breaks_nothing(clock):
    assert run(Meter(clock=clock), clock, [0, 0])[-1].tokens_per_second == 0


def test_the_end_of_a_run_takes_no_time(clock):
    assert run(Meter(clock=clock, num_steps=2), clock, [1, 1, 1])[-1].seconds_left == 0


@pytest.mark.parametrize("settings", [{"window": 0}, {"num_ranks": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        Meter(**settings)
