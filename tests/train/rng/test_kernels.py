from __future__ import annotations

import torch

from vescale_train.rng.kernels import plain_kernels

NO_DRAW = {
    "aten::_fused_sdp_choice",  # a choice of kernel
    "aten::_scaled_dot_product_flash_attention_for_cpu",  # refuses dropout itself
}
OUT_OF_SIGHT = {
    # variants with an out= argument of kernels that are refused or written anew; no module of torch calls them
    "aten::normal.Tensor_float_out",
    "aten::normal.float_Tensor_out",
    "aten::normal.Tensor_Tensor_out",
    "aten::multinomial.out",
    "aten::rrelu_with_noise.out",
}


def operations():
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            yield name, getattr(getattr(torch.ops.aten, packet), overload or "default")


def test_every_operation_with_a_kernel_that_draws_is_known():
    """A new torch may have new ones: each must be written for a place, or refused."""
    known = set(plain_kernels(lambda: None))
    found = {
        name: op
        for name, op in operations()
        if torch.Tag.nondeterministic_seeded in op.tags and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    }
    assert set(found) - {op.name() for op in known} == NO_DRAW | OUT_OF_SIGHT
