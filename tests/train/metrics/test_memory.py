import torch

from vescale_train.metrics.memory import read_memory, reset_peak


def test_the_host_s_peak_only_grows():
    before = read_memory()
    block = torch.ones(1 << 24)
    after = read_memory(torch.device("cpu"))
    assert 10 << 20 < before.host_peak_bytes <= after.host_peak_bytes
    assert after.host_peak_bytes > block.numel() * 4
    assert (after.device_bytes, after.device_peak_bytes) == (0, 0)
    reset_peak()
    reset_peak(torch.device("cpu"))
