from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from vescale_train.rng.handlers import LIKE, Handlers


def test_every_operation_that_torch_calls_random_for_dtensors_is_handled():
    handled = set(Handlers(lambda: None).table())
    assert set(DTensor._op_dispatcher._random_ops) - handled == {
        torch.ops.aten.rand.default,
        torch.ops.aten.randn.default,  # these make plain tensors
        torch.ops.aten.randint_like.low_dtype_out,
    }
    assert set(LIKE) <= handled
