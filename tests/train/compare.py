"""Comparing a parallel model with the same one on one device."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def run(model, inputs, loss_of=lambda output: output.loss):
    """Return the loss and the gradients of one batch, and forget the gradients."""
    loss = loss_of(model(**inputs) if isinstance(inputs, dict) else model(*inputs))
    loss.backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    return loss.detach(), found


def apart(here, there):
    """Return how far two runs are from one another: losses relative; gradients relative to the largest of their
    tensor, or to a thousandth of the largest of all for those that are zero but for rounding (BERT's key biases)."""
    (loss, gradient), (other_loss, other_gradient) = here, there
    assert gradient.keys() == other_gradient.keys()
    floor = max(float(g.abs().max()) for g in gradient.values()) * 1e-3
    worst = max(
        float((gradient[name] - other_gradient[name]).abs().max()) / max(float(gradient[name].abs().max()), floor)
        for name in gradient
    )
    return {
        "loss": abs(float(loss - other_loss)) / abs(float(loss)),
        "gradient": worst,
        "bits": torch.equal(loss, other_loss)
        and all(torch.equal(gradient[name], other_gradient[name]) for name in gradient),
    }
