from __future__ import annotations

import pytest
import torch

from vescale_ckpt.stage.device import SideStream


def test_host_memory_is_copied_at_once():
    stream = SideStream()
    with stream.copying(torch.ones(3)) as may_return_early:
        assert may_return_early is False
    stream.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_takes_the_values_of_the_call():
    source = torch.zeros(1 << 24, device="cuda")
    source.fill_(1.0)
    stream = SideStream()
    target = torch.empty(1 << 24, pin_memory=True)
    with stream.copying(source) as may_return_early:
        target.copy_(source, non_blocking=may_return_early)
    stream.wait()
    assert bool((target == 1.0).all())
