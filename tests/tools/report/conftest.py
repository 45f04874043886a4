from __future__ import annotations

import pytest
import torch

import vescale_ckpt as vc

HOSTILE = 'run <script>alert(1) & "x"'


@pytest.fixture
def logged(tmp_path):
    """Make a store with a run that logs losses and seconds, shares tensors, and has names that are markup."""
    generator = torch.Generator().manual_seed(0)
    frozen = torch.randn(300, 200, generator=generator)
    with vc.open_store(tmp_path / "s") as store:
        with vc.Checkpointer(store, "run") as checkpointer:
            for step in range(10, 60, 10):
                state = {
                    "model": {"<frozen>.weight": frozen, "head.weight": torch.randn(200, 40, generator=generator)},
                    "optimizer": {"state": {"head.weight": {"exp_avg": torch.randn(200, 40, generator=generator)}}},
                    "extra": {"loss": 100.0 / step, "seconds": {"stage": 0.1, "write": step / 100, "total": 9.0}},
                }
                checkpointer.save(step, state, metadata={"note": "</svg>"})
        store.tag("run", 30, "best")
        with vc.Checkpointer(store, HOSTILE) as checkpointer:
            checkpointer.save(1, {"epoch": 1})
    return tmp_path / "s"
