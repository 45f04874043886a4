import io

import pytest

from vescale_train.metrics.memory import Memory
from vescale_train.metrics.meter import Reading
from vescale_train.metrics.progress import Progress, describe


def reading(step=12, **more):
    known = {
        "loss": 2.34567,
        "step_seconds": 0.25,
        "tokens_per_second": 123_456.0,
        "mfu": 0.4123,
        "memory": Memory(host_peak_bytes=2_500_000_000, device_bytes=0, device_peak_bytes=0),
        "seconds_left": 3725.0,
    }
    return Reading(step=step, **known | more)


def test_a_reading_is_one_line():
    assert describe(reading(), 100) == (
        "step 12/100 · loss 2.3457 · 123k tokens/s · 250 ms/step · MFU 41.2% · 2.5GB · 1:02:05 left"
    )


def test_what_is_not_known_is_left_out():
    bare = reading(tokens_per_second=0.0, mfu=None, seconds_left=None)
    assert describe(bare) == "step 12 · loss 2.3457 · 2.5GB"


def test_a_device_s_memory_goes_before_the_host_s():
    memory = Memory(host_peak_bytes=10**9, device_bytes=1, device_peak_bytes=41 * 10**9)
    assert "41GB" in describe(reading(memory=memory))


@pytest.mark.parametrize(("rate", "text"), [(7.0, "7 tokens"), (1500.0, "1.5k"), (2.5e6, "2.5M"), (3e18, "3000P")])
def test_numbers_are_short(rate, text):
    assert text in describe(reading(tokens_per_second=rate))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_a_line_now_and_then_and_the_last():
    file, now = io.StringIO(), iter([0.0, 4.0, 11.0, 12.0, 13.0])
    with Progress(9, file=file, clock=lambda: next(now)) as progress:
        for step in range(1, 6):
            progress.show(reading(step))
    assert [line.split(" ", 2)[1] for line in file.getvalue().splitlines()] == ["1/9", "3/9", "5/9"]


def test_a_terminal_gets_a_bar_and_keeps_the_last_line(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Progress(9, file=file) as progress:
        progress.show(reading(3))
    with Progress(file=file) as progress:
        progress.show(reading(4))
    assert "step 3/9 · loss" in file.getvalue()
    assert "━" in file.getvalue()
    assert "step 4 · loss" in file.getvalue()


def test_nothing_shown_prints_nothing():
    file = io.StringIO()
    with Progress(file=file):
        pass
    assert file.getvalue() == ""
