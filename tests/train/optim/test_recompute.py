from __future__ import annotations

import torch

from tests.train.ddp import gpt
from vescale_train.optim import recompute_activations


def gradients(model):
    gpt.loss_of(model, gpt.micro_batch(0, 0)).backward()
    return [p.grad for p in model.parameters()]


def saved_bytes(model):
    count = 0

    def pack(tensor):
        nonlocal count
        count += tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gpt.loss_of(model, gpt.micro_batch(0, 0))
    return count


def test_gradients_keep_their_bits_names_stay_and_less_is_kept():
    plain, model = gpt.make(), recompute_activations(gpt.make())
    assert list(model.state_dict()) == list(plain.state_dict())
    half = recompute_activations(gpt.make(), every=2)
    assert saved_bytes(model) < saved_bytes(half) < saved_bytes(plain)
    for one, other in zip(gradients(model), gradients(plain), strict=True):
        assert one is other is None or torch.equal(one, other)
