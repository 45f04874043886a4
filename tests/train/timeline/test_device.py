import torch

from vescale_train.timeline.device import DeviceClock, device_clock


def test_events_are_told_in_the_host_s_time(events):
    clock = DeviceClock("cuda:1", events.new, events.synchronize, lambda: events.host_ns)
    events.device_ms += 1.5
    event = clock.mark()
    assert clock.time_ns(event) == 5_001_500_000


def test_a_new_base_follows_both_clocks(events):
    clock = DeviceClock("cuda:1", events.new, events.synchronize, lambda: events.host_ns)
    events.host_ns += 7_000
    events.device_ms += 9.0  # the device's clock is fast: only the distance to the new base counts
    clock.rebase()
    events.device_ms += 1.0
    assert clock.time_ns(clock.mark()) == 5_001_007_000
    assert events.num_waits == 2


def test_the_processor_has_no_clock_of_its_own():
    assert device_clock(None) is None
    assert device_clock(torch.device("cpu")) is None
