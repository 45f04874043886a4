import itertools

import pytest
import torch
from torch import nn

from vescale_train.errors import ConfigError
from vescale_train.metrics.flops import count_flops, measure_flops, peak_flops, transformer_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H200", 989e12),
    ],
)
def test_devices_are_told_by_their_names(name, peak):
    assert peak_flops(name, torch.bfloat16) == peak


def test_what_is_not_known_is_not_guessed():
    with pytest.raises(ConfigError, match="'Some Card'"):
        peak_flops("Some Card", torch.bfloat16)
    with pytest.raises(ConfigError, match="float64 is known for NVIDIA H200"):
        peak_flops("NVIDIA H200", torch.float64)


def test_a_product_is_counted_with_its_backward():
    layer = nn.Linear(8, 16, bias=False, device="meta")
    x = torch.empty(4, 8, device="meta", requires_grad=True)
    assert count_flops(lambda: layer(x)) == 2 * 4 * 8 * 16
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * 2 * 4 * 8 * 16


def test_the_formula_is_near_what_is_counted():
    width, layers, context = 64, 3, 32
    block = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, bias=False)
    model = nn.TransformerEncoder(block, layers, enable_nested_tensor=False).train()
    x = torch.randn(2, context, width, requires_grad=True)
    counted = count_flops(lambda: model(x).sum().backward()) / (2 * context)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    formula = transformer_flops(num_parameters=matrices, num_layers=layers, width=width, context=context)
    assert counted == pytest.approx(formula, rel=0.1)  # a kernel may compute forward products again in backward
    again = transformer_flops(num_parameters=matrices, num_layers=layers, width=width, context=context, recompute=True)
    assert again == pytest.approx(formula * 4 / 3)


def test_a_practical_peak_is_that_of_the_best_try():
    ticks = itertools.accumulate([0, 4, 4, 2, 2, 8, 8, 4, 4, 4])
    found = measure_flops(torch.device("cpu"), torch.float32, clock=lambda: next(ticks), size=4)
    assert found == 2 * 4**3 / 2
